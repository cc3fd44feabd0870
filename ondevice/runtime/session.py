"""The session contract, where runtimes look for it (it lives beside the methods, which implement it too)."""

from ondevice.methods.session import Session, StepResult

__all__ = ["Session", "StepResult"]
