"""Combined values of rounds in which some members took no part, kept until those have them."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

# Number of the round, then the counts of members, participants and results.
_HEAD = struct.Struct("!QIII")


@dataclasses.dataclass(frozen=True)
class CombinedRound:
    """The results of a round's operations.

    `members` are the ids of the view in which it ran, `participants` of those whose values it
    combines.
    """

    number: int
    members: tuple[int, ...]
    participants: tuple[int, ...]
    results: tuple[bytes, ...]

    def encode(self) -> bytes:
        """Returns it as bytes."""
        sizes = [len(result) for result in self.results]
        counts = len(self.members), len(self.participants), len(sizes)
        ids = (*self.members, *self.participants)
        numbers = struct.pack(f"!{len(ids)}I{len(sizes)}Q", *ids, *sizes)
        head = _HEAD.pack(self.number, *counts)
        return b"".join((head, numbers, *self.results))

    @staticmethod
    def decode(content: bytes | bytearray) -> CombinedRound:
        """Returns the round whose bytes these are."""
        number, num_members, num_participants, num_results = _HEAD.unpack_from(content)
        num_ids = num_members + num_participants
        numbers = struct.Struct(f"!{num_ids}I{num_results}Q")
        found = numbers.unpack_from(content, _HEAD.size)
        place = _HEAD.size + numbers.size
        results: list[bytes] = []
        for size in found[num_ids:]:
            results.append(bytes(content[place : place + size]))
            place += size
        members, participants = found[:num_members], found[num_members:num_ids]
        return CombinedRound(number, members, participants, tuple(results))


class CombinedRounds:
    """Committed rounds that some member lacks, in their order."""

    def __init__(self) -> None:
        self._rounds: dict[int, CombinedRound] = {}

    def __len__(self) -> int:
        return len(self._rounds)

    def keep(self, one: CombinedRound) -> None:
        """Adds a round."""
        self._rounds[one.number] = one

    def drop(self, number: int) -> None:
        """Forgets the rounds up to a number, which all members have."""
        for key in [key for key in self._rounds if key <= number]:
            del self._rounds[key]

    def after(self, number: int) -> Sequence[CombinedRound]:
        """Returns the rounds after a number."""
        return [self._rounds[key] for key in sorted(self._rounds) if key > number]
