"""Places in memory of some rows of a table, those that were used lately."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stratagem.parameter_server.server.tables.growing_array import GrowingArray

# Frames are looked at, and freed, at least so many at once, so that most calls free none.
_WINDOW, _FREED_PART = 2**12, 64


class RowFrames:
    """Frames of slots: numbers of rows in arrays in memory. Callers serialize calls.

    `num_frames` have been made, and `num_used` have a row. Frames are freed by CLOCK: the hand
    passes over a frame that was used since its last visit, one that is pinned, and one whose row is
    not clean. `num_drops` grows with each call that frees frames.

    Source: Corbató, A paging experiment with the Multics system (1968).

    Args:
        most_slots: largest number of slots.
        most_frames: largest number of frames.
        are_clean: returns False for each of some slots that must stay in memory.
    """

    def __init__(
        self, most_slots: int, most_frames: int, are_clean: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        self._are_clean = are_clean
        self._frames = GrowingArray((), np.int32, most_slots)
        self._num_slots = 0
        self._slots = GrowingArray((), np.int32, most_frames)
        self._is_recent = GrowingArray((), np.bool_, most_frames)
        self._is_pinned = GrowingArray((), np.bool_, most_frames)
        self._free = GrowingArray((), np.int32, most_frames)
        self._num_free = 0
        self._hand = 0
        self._pinned = np.empty(0, np.int64)
        self.num_frames = self.num_drops = 0

    @property
    def num_used(self) -> int:
        """Number of rows in memory."""
        return self.num_frames - self._num_free

    @property
    def slot_bytes(self) -> int:
        """Memory of a slot."""
        return self._frames.row_bytes

    @property
    def frame_bytes(self) -> int:
        """Memory of a frame."""
        arrays = (self._slots, self._is_recent, self._is_pinned, self._free)
        return sum(one.row_bytes for one in arrays)

    def grow(self, num_slots: int) -> None:
        """Adds slots without a frame, up to `num_slots`."""
        self._frames.grow(num_slots)
        self._frames.array[self._num_slots : num_slots] = -1
        self._num_slots = max(num_slots, self._num_slots)

    def reserve(self, num_new: int) -> None:
        """Makes memory for `num_new` more frames available, or raises MemoryError."""
        for one in (self._slots, self._is_recent, self._is_pinned):
            one.grow(self.num_frames + num_new)

    def find(self, slots: np.ndarray) -> np.ndarray:
        """Returns the frame of each slot; -1 without one."""
        return self._frames.array[slots].astype(np.int64)

    def use(self, frames: np.ndarray) -> None:
        """Records a use of frames."""
        self._is_recent.array[frames] = True

    def pin(self, frames: np.ndarray) -> None:
        """Keeps frames, and no others, from being freed."""
        self._is_pinned.array[self._pinned] = False
        self._is_pinned.array[frames] = True
        self._pinned = frames

    def add(self, slots: np.ndarray) -> np.ndarray:
        """Returns new frames of distinct slots without one."""
        num_old = min(len(slots), self._num_free)
        old = self._free.array[self._num_free - num_old : self._num_free]
        num_new = len(slots) - num_old
        self.reserve(num_new)
        frames = np.concatenate([old, np.arange(self.num_frames, self.num_frames + num_new)])
        self._num_free -= num_old
        self.num_frames += num_new
        self._frames.array[slots] = frames
        self._slots.array[frames] = slots
        self._is_recent.array[frames] = True
        self._is_pinned.array[frames] = False
        return frames

    def make_room(self, count: int, capacity: int, kept: np.ndarray | None = None) -> int:
        """Frees frames, so that `count` more are used within `capacity`; returns how many can be.

        Frames of `kept` are not freed.
        """
        excess = self.num_used + count - capacity
        if excess > 0:
            held = self._pinned
            if kept is not None:
                self.pin(np.concatenate([held, kept]))
            self._free_some(max(excess, capacity // _FREED_PART))
            self.pin(held)
        return max(0, min(count, capacity - self.num_used))

    def _free_some(self, num_wanted: int) -> None:
        window = max(_WINDOW, 2 * num_wanted)
        for _ in range(2 * -(-self.num_frames // window)):  # twice: the first visit may pass over
            end = min(self._hand + window, self.num_frames)
            frames = np.arange(self._hand, end)
            slots = self._slots.array[frames].astype(np.int64)
            is_found = (slots >= 0) & ~self._is_recent.array[frames]
            is_found &= ~self._is_pinned.array[frames]
            is_found[is_found] = self._are_clean(slots[is_found])
            found = np.flatnonzero(is_found)[:num_wanted]
            if len(found) == num_wanted:  # the hand stops after the last one
                end = self._hand + int(found[-1]) + 1
            self._is_recent.array[self._hand : end] = False
            self._hand = 0 if end == self.num_frames else end
            if len(found):
                self._drop(frames[found], slots[found])
            num_wanted -= len(found)
            if not num_wanted:
                return

    def _drop(self, frames: np.ndarray, slots: np.ndarray) -> None:
        self._frames.array[slots] = -1
        self._slots.array[frames] = -1
        self._free.grow(self._num_free + len(frames))
        self._free.array[self._num_free : self._num_free + len(frames)] = frames
        self._num_free += len(frames)
        self.num_drops += 1
