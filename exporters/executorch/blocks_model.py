"""A block program that predicts the next token: the host keeps what was read, and walks the
layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import ArtifactError, ConfigError, VerificationError
from ondevice.core.program import FUSED
from ondevice.exporters.executorch.cache import WRITTEN, Cache
from ondevice.exporters.executorch.walk import Walk, can_walk
from ondevice.nn.adapters import adapted

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.artifact.adapter import Adapter
    from ondevice.models import LoadedModel


class BlocksModel:
    """A `TokenModel` over a program's session; its adapter takes part.

    Args:
        session: a `BlocksSession` of a program that was exported with `export.context_tokens`.

    Attributes:
        context_tokens: most tokens of a conversation.
        piece_tokens: most tokens of a pass.
        read: tokens that were read so far.

    Raises:
        ArtifactError: the program cannot generate.
    """

    def __init__(self, session: Any) -> None:
        import torch

        if not can_generate(session):
            hint = "export it again with --set export.context_tokens=512"
            raise ArtifactError("the program has no functions that generate", hint=hint)
        self.session = session
        methods = session.spec.methods
        # Of one token too, or it goes through what reads many, filled up.
        names = ["embed_prefill", "embed_decode"]
        if session.fused:
            names.append(FUSED + "embed_read")
        self.sizes = {
            methods[name].inputs[0].shape[1]: name.rpartition("_")[2]
            for name in names
            if name in methods
        }
        """Tokens of a pass, and what its functions are called."""
        self.piece_tokens = max(self.sizes)
        self.context_tokens = session.spec.context_tokens
        self.read = 0
        self.cache = Cache(session.spec)
        self.walk = None
        if 1 in self.sizes and can_walk(session, f"block_{self.sizes[1]}"):
            of_layers = (torch.stack([one[role] for one in self.cache.layers]) for role in WRITTEN)
            keys, values = of_layers
            self.cache.layers = [dict(zip(WRITTEN, both)) for both in zip(keys, values)]
            self.walk = Walk(session, f"block_{self.sizes[1]}", keys, values)

    def use(self, adapter: Adapter | None) -> None:
        """Change the session's adapter, and forget what was read; None restores the initial one."""
        if adapter is None:
            self.session.restart()
        else:
            self.session.load_adapter(adapter)
        self.rewind(0)

    def rewind(self, tokens: int) -> int:
        """Forget all but the first `tokens` tokens; a state that only goes on goes back to the end
        of the last prompt, or to none."""
        self.read = self.cache.rewind(self.read, tokens)
        return self.read

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Read the next tokens; return the logits of the one after them, float32 [vocab].

        Raises:
            ArtifactError: a logit is not finite.
            ConfigError: no token, or the conversation is longer than the context.
        """
        check_room(ids, self.read, self.context_tokens)
        logits = self._feed(ids)
        if len(ids) > 1:
            self.cache.mark(self.read)
        return logits

    def _feed(self, ids: Sequence[int]) -> np.ndarray:
        while True:
            many = self._size(len(ids))
            part = ids[:many]
            ids = ids[many:]
            hidden = self._pass(part, many)
            self.read += len(part)
            if not ids:
                return self._head(hidden[len(part) - 1 : len(part)].contiguous())

    def _size(self, tokens: int) -> int:
        """Return the tokens of the next pass: the most that the context has room for; more
        than half of the widest pass is real."""
        room = self.context_tokens - self.read
        for size in sorted(self.sizes, reverse=True):
            widest = len(self.sizes) > 2 and size == self.piece_tokens
            if size <= room and tokens > (size // 2 if widest else 1):
                return size
        return min(self.sizes)

    def _head(self, hidden: Tensor) -> np.ndarray:
        logits = self.session.head.logits(hidden)
        if not np.isfinite(logits).all():
            raise ArtifactError(
                "the program's logits are not finite",
                received="inf or nan: hidden states that float16 cannot hold, or an adapter with such values",
                hint="chat with the model in PyTorch",
            )
        return logits

    def _pass(self, ids: Sequence[int], size: int) -> Tensor:
        """Compute the hidden states of `size` tokens, [size, D]; behind `ids` they are of padding,
        and not kept."""
        import torch

        name = self.sizes[size]
        session = self.session
        row = torch.tensor([[*ids, *[0] * (size - len(ids))]])
        x = session._call_block(f"embed_{name}", {"ids": row})["hidden"]
        start = torch.tensor([self.read])
        if size == 1 and self.walk is not None:
            return self.walk.run(x, start)
        session.begin_pass(name, row, x)
        given = {"position": start, "length": torch.tensor([len(ids)])}
        for layer, cache in enumerate(self.cache.layers):
            full = f"block_{name}{session.kind(layer)}"
            outputs = session.run_block(full, {"hidden": x, **given, **cache}, layer, len(ids))
            x = outputs["hidden"]
            self.cache.write(layer, outputs, self.read, len(ids))
        return x


def check_room(ids: Sequence[int], read: int, context_tokens: int) -> None:
    """Refuse what does not fit behind the `read` tokens of a conversation.

    Raises:
        ConfigError: no token, or the conversation is longer than the context.
    """
    if not ids or read + len(ids) > context_tokens:
        problem = "the conversation is longer than the program's context"
        if not ids:
            problem = "the prompt is empty"
        raise ConfigError(
            problem,
            expected=f"1 to {context_tokens} tokens in all",
            received=f"{read + len(ids)} tokens",
            hint="export it again with a larger export.context_tokens",
        )


def check_tokens(
    loaded: LoadedModel, context_tokens: int, chunk_tokens: int
) -> tuple[list[int], int]:
    """Return what a check reads: a prompt of more than one chunk, where the context has room, and
    two tokens behind it.

    It is a text, because rounding moves the logits of a trained model less there than on tokens
    that were drawn.

    Returns:
        All ids, and the length of the prompt.
    """
    length = min(context_tokens - 2, chunk_tokens + 5)
    ids = list(loaded.tokenizer(CHECK_TEXT, add_special_tokens=False)["input_ids"])
    return (ids * (1 + (length + 2) // len(ids)))[: length + 2], length


def check_blocks_model(session: Any, loaded: LoadedModel, limit: float = 0.0) -> float:
    """Compare logits behind a prompt, read in both ways, with eager PyTorch's under the session's
    adapter.

    Args:
        loaded: the model with the weights that the program has, rounded as they are.
        limit: largest error, `LOGIT_ERROR` unless given.

    Returns:
        The largest difference, as a part of the largest logit.

    Raises:
        VerificationError: it is beyond the limit.
    """
    import torch

    program = BlocksModel(session)
    adapter = session.adapter()
    limit = limit or LOGIT_ERROR
    ids, length = check_tokens(loaded, program.context_tokens, program.piece_tokens)
    with adapted(loaded, adapter), torch.no_grad():
        expected = loaded.model(torch.tensor([ids])).logits[0, length - 1 :].numpy()
    found = np.stack(
        [program.feed(ids[:length]), *(program.feed([token]) for token in ids[length:])]
    )
    error = float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))
    if not error <= limit:
        raise VerificationError(
            "the program does not generate what eager PyTorch does; nothing was written",
            expected=f"logits within {limit:g} of the largest",
            received=f"{error:.3g}",
        )
    return error


LOGIT_ERROR = 1e-4
CHECK_TEXT = """A river begins as rain on a hill. The water runs down between stones, meets other water, and cuts a
bed of its own. For the first few miles it is loud and fast; in spring it carries gravel, branches, sometimes a whole
tree. Lower down, where the land is flat, it slows and drops what it has brought, and bends from one side of the
valley to the other. People have always lived beside rivers. They drink from them, fish in them, build mills and
bridges, and draw borders along them. When a river floods, it leaves fine mud on the fields, which farmers along the
Nile waited for every year. At the end it reaches the sea, and nobody can say exactly where one stops and the other
begins."""


def can_generate(session: object) -> bool:
    """Return True if a session's program has the functions that generate with a cache."""
    spec = getattr(session, "spec", None)
    return spec is not None and "block_prefill" in spec.methods
