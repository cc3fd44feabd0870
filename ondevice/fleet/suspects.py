"""Find devices that spoil secure sums, whose vectors nobody sees, by leaving out half of them in
turn."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ondevice.fleet.secure import LEAST


class Suspects:
    """The devices among which a liar is; none while all sums are plausible.

    A liar among n devices costs some log2(n) rounds. Two devices have no sum, so a fleet of three
    finds nobody."""

    def __init__(self) -> None:
        self.devices: frozenset[int] = frozenset()

    def asked(self, devices: Collection[int], draw: np.random.Generator) -> list[int]:
        """Return which of the devices a round should ask: while there are suspects, without half of
        them."""
        suspects = sorted(self.devices & set(devices))
        half = [
            suspects[place] for place in draw.permutation(len(suspects))[: -(-len(suspects) // 2)]
        ]
        most = max(0, len(devices) - LEAST)
        return sorted(set(devices) - set(half[:most]))

    def saw(self, devices: Collection[int], plausible: bool) -> int | None:
        """Learn from a sum; returns the liar, once it is known."""
        inside = set(devices)
        if plausible:
            self.devices -= inside
        else:
            self.devices = self.devices & inside or frozenset(inside)
        if len(self.devices) != 1:
            return None
        (liar,) = self.devices
        self.devices = frozenset()
        return liar
