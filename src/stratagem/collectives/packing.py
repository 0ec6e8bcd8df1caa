"""Which arrays travel together, where each message has a price of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

__all__ = ["BETWEEN_PROCESSES", "NO_PACKING", "WITHIN_PROCESS", "Packing"]


@dataclasses.dataclass(frozen=True)
class Packing:
    """A rule for joining arrays.

    Args:
        max_array_bytes: larger arrays travel alone, because copying them costs more than a message.
        pack_bytes: arrays are joined up to this size.
    """

    max_array_bytes: int
    pack_bytes: int

    def packs(self, sizes_bytes: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
        """Returns which arrays travel together.

        Args:
            sizes_bytes: of the arrays.
            kinds: only arrays of one kind, such as a dtype, can be joined.

        Returns:
            The places of the arrays, a list for each message, each place once.

        Example:
            >>> from stratagem.collectives.packing import Packing
            >>> Packing(max_array_bytes=50, pack_bytes=100).packs([40, 60, 40, 40], ["f"] * 4)
            [[1], [0, 2], [3]]
        """
        alone: list[list[int]] = []
        packs: list[list[int]] = []
        open_packs: dict[Hashable, tuple[list[int], int]] = {}
        for place, (size, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
            if size > self.max_array_bytes:
                alone.append([place])
                continue
            pack, filled = open_packs.get(kind, ([], 0))
            if not pack or filled + size > self.pack_bytes:
                pack, filled = [], 0
                packs.append(pack)
            pack.append(place)
            open_packs[kind] = pack, filled + size
        return alone + packs


NO_PACKING = Packing(max_array_bytes=-1, pack_bytes=0)
# Measured on two CPU devices of one process: copying larger arrays costs more than the messages.
WITHIN_PROCESS = Packing(max_array_bytes=2**16, pack_bytes=2**62)
BETWEEN_PROCESSES = Packing(max_array_bytes=2**22, pack_bytes=2**22)
