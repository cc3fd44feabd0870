"""Command-line flags as metadata of settings: a field declares its flag, and every verb with its
section offers it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Flag:
    """The flag of a setting: `rank: Annotated[int, Flag("--rank")] = 8`.

    Attributes:
        name: the flag; `also` is another spelling of it, such as `-n`.
        help: of the flag; by default the first sentence of the field's docstring.
        type: of the value on the command line, if the field's validator reads another than the
            field has.
        repeat: repeat the flag for each value of a list, instead of commas.
    """

    name: str
    also: str = ""
    _: KW_ONLY
    help: str = ""
    type: type | None = None
    repeat: bool = False


# Flags of settings that several methods have, so that they read the same for all of them.
ALPHA = Flag("--alpha", help="LoRA alpha: the adapter's output is scaled by alpha / rank")
BUS_LIMIT = Flag("--bus-limit", help="Simulate a bus with this many GB/s in each direction")
HOST_MEMORY = Flag(
    "--host-memory", type=str, help="Most host memory the run may take, such as 96GiB"
)
LEARNING_RATE = Flag("--learning-rate", "--lr", help="Learning rate")
MAX_GRAD_NORM = Flag("--max-grad-norm", help="Clip the gradient to this norm")
MICRO_BATCH_SIZE = Flag(
    "--micro-batch-size", help="Rows computed at once; the gradients of a batch are accumulated"
)
PERTURBATION_SCALE = Flag("--perturbation-scale", help="Distance along a direction (epsilon)")
QUERIES = Flag("--queries", help="Random directions per step (q)")
RANK = Flag("--rank", help="LoRA rank")
TARGET_MODULES = Flag("--target-modules", help="Linear layers that get an adapter")
WEIGHT_DECAY = Flag("--weight-decay", help="Decoupled weight decay")
