"""The session contract, where runtimes look for it (it lives beside the methods, which implement it too)."""

from ondevice.methods.session import Evaluator, Session, StepResult

__all__ = ["Evaluator", "Session", "StepResult"]
