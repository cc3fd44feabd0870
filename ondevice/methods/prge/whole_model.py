"""P-RGE's step on a decoder whose blocks are not known."""

from __future__ import annotations

from torch import Tensor

from ondevice.methods.prge.step import CopiesOf, PrgeProgram


class WholeModelProgram(PrgeProgram):
    """P-RGE's step on a model that runs only as a whole: all copies of all B exist during a pass;
    layers below `top_layers` run once for each copy."""

    def _run_prefix(
        self,
        ids_BT: Tensor,
        position_ids_BT: Tensor | None = None,
        branches_BT: Tensor | None = None,
    ) -> Tensor:
        return ids_BT

    def _run_suffix(
        self,
        ids_BT: Tensor,
        copies_of: CopiesOf,
        position_ids_RT: Tensor | None = None,
        branches_RT: Tensor | None = None,
    ) -> Tensor:
        # `repeat` has made [copies, batch, tokens] of [batch, tokens].
        for entry in self.layout.entries:
            self._give(entry, copies_of(entry.offset, entry.count))
        try:
            return self.family.hidden(ids_BT.flatten(0, -2), position_ids=position_ids_RT)
        finally:
            for linear in self.linears.values():
                linear.slot.copies = None
