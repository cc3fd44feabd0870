"""SlideFormer on several ranks: rank 0 trains as if alone, and the others do what it does.

Data, log, checkpoints, progress and signals are rank 0's alone. So nothing that trains a session knows of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.methods.slideformer.torch import OffloadSession

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ondevice.methods.session import StepResult


class Leader(OffloadSession):
    """Rank 0's session: every call is made on all ranks, with the same arguments."""

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """One AdamW step on the rows of all ranks."""
        self.ranks.tell(("step", (ids, labels, step, learning_rate)))
        return super().step(ids, labels, step, learning_rate)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row losses and token counts; every rank computes all rows."""
        self.ranks.tell(("evaluate", (ids, labels)))
        return super().evaluate(ids, labels)

    def state(self) -> dict[str, np.ndarray]:
        """Masters and moments of all ranks: this one's as views, copies of the others'."""
        self.ranks.tell(("state", ()))
        return super().state()

    def load_state(self, state: dict[str, np.ndarray] | None) -> None:
        """Take back what `state` gave, and give the others theirs."""
        self.ranks.tell(("load_state", (None,)))
        super().load_state(state)

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained parameters of all ranks by name."""
        self.ranks.tell(("weights", ()))
        return super().weights()

    def finish(self, outcome: Any) -> None:
        """Let the others end; `outcome` is what their `follow` returns."""
        self.ranks.tell(("finish", outcome))


class Follower(OffloadSession):
    """Another rank's session."""

    def follow(self) -> Any:
        """Do what rank 0 does until it has finished.

        Raises:
            TrainingError: rank 0 has ended without a word.
        """
        while True:
            call: tuple[str, Any] = self.ranks.tell()
            name, arguments = call
            if name == "finish":
                self.close()
                return arguments
            getattr(self, name)(*arguments)
            if name == "state":
                self.written(None)
