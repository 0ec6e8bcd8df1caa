"""Position of a consumer in a job: the batches that it has returned, as JSON."""

from __future__ import annotations

from typing import Any

from stratagem.input.service.ranges import EVERY_NUMBER, NumberRanges

# So many splits that coordinated reads are past are remembered with their batches. Consumers are
# never farther apart than workers read ahead.
_MOST_PASSED = 256


class ConsumerPosition:
    """Batches that a consumer has returned.

    A split whose batches were all returned by this consumer counts as done, so that the position
    stays small. In a job that several consumers share, it grows with the splits that they share.
    `cursor` is the place of coordinated reads.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.cursor: Any = None
        self._done, self._passed = NumberRanges(), NumberRanges()
        self._parts: dict[int, NumberRanges] = {}
        self._lengths: dict[int, int] = {}
        self._passed_parts: dict[int, NumberRanges] = {}  # oldest first
        if state is not None:
            self.cursor = state["cursor"]
            self._done = NumberRanges(state["done"])
            self._passed = NumberRanges(state["passed"])
            self._parts = {
                int(split): NumberRanges(ranges) for split, ranges in state["parts"].items()
            }

    def add(self, split: int, index: int) -> None:
        """Notes a batch that is returned."""
        self._parts.setdefault(split, NumberRanges()).add(index)
        self._compact(split)

    def note_length(self, split: int, length: int) -> None:
        """Notes the number of batches of a split."""
        self._lengths[split] = length
        self._compact(split)

    def _compact(self, split: int) -> None:
        length, part = self._lengths.get(split), self._parts.get(split)
        if length is not None and (len(part) if part else 0) == length:
            self._parts.pop(split, None)
            del self._lengths[split]
            self._done.add(split)

    def pass_split(self, split: int) -> None:
        """Notes that coordinated reads are past a split: others have its other batches."""
        self._passed.add(split)
        self._passed_parts[split] = self._parts.pop(split, NumberRanges())
        if len(self._passed_parts) > _MOST_PASSED:
            del self._passed_parts[next(iter(self._passed_parts))]
        self._lengths.pop(split, None)

    def numbers_of(self, split: int) -> NumberRanges:
        """Returns the batches of a split that were returned."""
        if split in self._done:
            return NumberRanges([EVERY_NUMBER])
        return self._parts.get(split) or self._passed_parts.get(split) or NumberRanges()

    def state(self, *, num_consumers: int, num_lanes: int | None) -> dict[str, Any]:
        """Returns the position as JSON."""
        return {
            "num_consumers": num_consumers,
            "num_lanes": num_lanes,
            "done": self._done.as_json(),
            "passed": self._passed.as_json(),
            "parts": {str(split): part.as_json() for split, part in self._parts.items()},
            "cursor": self.cursor,
        }
