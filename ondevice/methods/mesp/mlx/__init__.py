"""MeSP in MLX: pure functions (`stages`, `head`), their order as data (`schedule`), and who walks it (`machine`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.mlx.session import MlxSession


def open_session(files: Any, config: MespConfig, seed: int) -> MlxSession:
    """The registry's door: a session over a model's files (`ModelFiles`); MLX is imported here, not before."""
    from ondevice.methods.mesp.mlx.session import open_session

    return open_session(files, config, seed)
