"""MeSP in torch: `stages` are the formulas, `blocks` their order, `passes` a batch, `session` the method."""

from ondevice.methods.mesp.torch.session import open_session

__all__ = ["open_session"]
