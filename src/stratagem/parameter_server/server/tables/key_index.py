"""Hash index from 64-bit keys to slots, for many keys per call.

Open addressing in buckets of eight places, each with a 7-bit tag of the key's hash. The tags of a
bucket are one 64-bit word, so that a few operations on words compare a key with eight places. A
place has the slot of its key, and the keys are stored by slot: a match of tags is then checked.

The index grows by linear hashing: buckets form segments, and one segment at a time is split in two.
A call therefore moves few keys beside its own, whatever the size of the index.

Source: Litwin, Linear hashing (1980); Abseil's Swiss tables, for tags in words.
"""

from __future__ import annotations

import math
import secrets

import numpy as np

from stratagem.parameter_server.server.tables.growing_array import GrowingArray
from stratagem.parameter_server.server.tables.key_hash import seeded

_BUCKET_BITS = 10
_BUCKETS = 1 << _BUCKET_BITS  # buckets of a segment
_PLACES = 8 * _BUCKETS
# Segments are split while a segment that was not yet split in this round has a share of full places
# between these: the splits are spread over the growth, and each segment has room.
_FIRST_SPLIT, _LAST_SPLIT = 0.6, 0.8
_MOST_SPLITS = 64  # segments split at once
_MOST_ROUNDS = 16 * _BUCKETS  # of a search, in a segment without an empty place
# After so many removed tags, a segment is cleaned of them, in turn.
_MOST_REMOVED = _PLACES // 8
_CHUNK = 1 << 14  # keys per pass: temporary arrays stay in the processor's cache

_EMPTY, _REMOVED = 0x80, 0xFE  # tags without a key; others are below 128
_ONE, _SEVEN = np.uint64(1), np.uint64(7)
_ONES = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0x8080808080808080)
_SECOND_BIT = np.uint64(6)  # of a tag, moved to its highest bit
_BYTE_SHIFT = np.uint64(3)


class KeyIndex:
    """Slots by key. Slots are chosen by the caller: each key has one below `most_slots`.

    `keys` has the key of each slot. Callers serialize calls; keys of a call are distinct, except in
    `find`. With a random `seed`, keys cannot be chosen so that they collide.
    """

    def __init__(self, most_slots: int, seed: int | None = None) -> None:
        self._seed = secrets.randbits(63) if seed is None else seed
        most_segments = 4 + math.ceil(2 * most_slots / (_FIRST_SPLIT * _PLACES))
        self._keys = GrowingArray((), np.int64, most_slots)
        self._tags = GrowingArray((_PLACES,), np.uint8, most_segments)
        self._slots = GrowingArray((_PLACES,), np.int32, most_segments)
        self.clear()

    def __len__(self) -> int:
        return self._num_keys

    @property
    def keys(self) -> np.ndarray:
        """Keys by slot; undefined for slots without a key."""
        return self._keys.array

    @property
    def size_bytes(self) -> int:
        """Memory of the buckets, without `keys`."""
        return self._num_segments * (self._tags.row_bytes + self._slots.row_bytes)

    def clear(self) -> None:
        """Removes all keys."""
        self._num_keys = self._num_removed = self._cleaned = 0
        # Segments before this round, which are split in order, and segments now.
        self._round, self._num_segments = 1, 0
        self._add_segments(1)

    def grow(self, num_slots: int) -> None:
        """Makes slots below `num_slots` available."""
        self._keys.grow(num_slots)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the int64 slot of each int64 key; -1 for an unknown key."""
        slots = np.empty(len(keys), np.int64)
        for first in range(0, len(keys), _CHUNK):
            slots[first : first + _CHUNK] = self._found(keys[first : first + _CHUNK])[0]
        return slots

    def insert(self, keys: np.ndarray, slots: np.ndarray) -> None:
        """Adds unknown keys at unused slots."""
        self.keys[slots] = keys
        for first in range(0, len(keys), _CHUNK):
            part = keys[first : first + _CHUNK]
            self._split_for(self._num_keys + len(part))
            buckets, tags = self._home(part)
            self._put(buckets, tags.astype(np.uint8), slots[first : first + _CHUNK])
            self._num_keys += len(part)

    def remove(self, slots: np.ndarray) -> None:
        """Removes the keys of slots."""
        for first in range(0, len(slots), _CHUNK):
            self._remove(slots[first : first + _CHUNK])

    def _remove(self, slots: np.ndarray) -> None:
        places = self._found(self.keys[slots])[1]
        # A search stops at an empty place: only in a bucket that has one, another may be empty.
        has_empty = _empty(self._words[places >> 3]) != 0
        tags = self._tags.array.reshape(-1)
        tags[places] = np.where(has_empty, _EMPTY, _REMOVED)
        self._num_keys -= len(slots)
        self._num_removed += len(slots) - int(np.count_nonzero(has_empty))
        while self._num_removed > _MOST_REMOVED:
            self._num_removed -= _MOST_REMOVED
            self._cleaned = (self._cleaned + 1) % self._num_segments
            self._place_again(self._cleaned, self._cleaned + 1)

    @property
    def _words(self) -> np.ndarray:
        return self._tags.array.reshape(-1).view(np.uint64)

    def _home(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first bucket of each key, and its tag as uint64."""
        hashes = seeded(keys, self._seed)
        buckets = hashes & np.uint64(2 * self._round - 1)
        buckets -= np.uint64(self._round) * (buckets >= np.uint64(self._num_segments))
        buckets <<= np.uint64(_BUCKET_BITS)
        buckets |= (hashes >> np.uint64(32)) & np.uint64(_BUCKETS - 1)
        return buckets.view(np.int64), (hashes >> np.uint64(42)) & np.uint64(127)

    def _found(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the slot and the place of each key; slot -1 for an unknown key."""
        stored, of_place, words = self.keys, self._slots.array.reshape(-1), self._words
        buckets, tags = self._home(keys)
        tags *= _ONES
        held = np.take(words, buckets)
        matches = _equal(held, tags)
        slots, places = np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.int64)
        rest: np.ndarray | slice = slice(None)  # of keys: those still searched
        wanted = keys
        num_rounds = 0
        while len(buckets) and num_rounds < _MOST_ROUNDS:
            num_rounds += 1
            at = (buckets << 3) + _first_byte(matches)
            is_match = matches != 0
            at *= is_match
            slot = np.take(of_place, at).astype(np.int64)
            slot *= is_match
            is_found = is_match & (_taken(stored, slot) == wanted)
            if is_found.all():
                slots[rest], places[rest] = slot, at
                break
            numbers = np.arange(len(keys)) if isinstance(rest, slice) else rest
            slots[numbers[is_found]] = slot[is_found]
            places[numbers[is_found]] = at[is_found]
            matches &= matches - _ONE
            # Without another match, an empty place ends the search.
            left = ~is_found & ((matches != 0) | (_empty(held) == 0))
            rest, wanted, buckets = numbers[left], wanted[left], buckets[left]
            tags, held, matches = tags[left], held[left], matches[left]
            is_next = matches == 0
            buckets = np.where(is_next, _next_bucket(buckets), buckets)
            held = np.where(is_next, np.take(words, buckets), held)
            matches = np.where(is_next, _equal(held, tags), matches)
        return slots, places

    def _put(self, buckets: np.ndarray, tags: np.ndarray, slots: np.ndarray) -> None:
        """Writes slots to free places. If several want one place, one wins and others try again.

        Keys of a bucket begin to look for a free place at different bytes, so that few collide.
        """
        words, of_place = self._words, self._slots.array.reshape(-1)
        all_tags = self._tags.array.reshape(-1)
        slots = slots.astype(np.int32)
        starts = slots.astype(np.uint64) & _SEVEN
        num_rounds = 0
        while len(buckets):
            if num_rounds == _MOST_ROUNDS:  # not with a random seed
                raise ValueError("a segment of an index of keys is full")
            num_rounds += 1
            free = np.take(words, buckets) & _HIGH
            shifts = starts << _BYTE_SHIFT
            turned = (free >> shifts) | (free << ((np.uint64(64) - shifts) & np.uint64(63)))
            at = (buckets << 3) + ((_first_byte(turned) + starts.astype(np.int64)) & 7)
            is_free = free != 0
            candidates = at[is_free]
            of_place[candidates] = slots[is_free]
            has_won = is_free.copy()
            has_won[is_free] = of_place[candidates] == slots[is_free]
            all_tags[at[has_won]] = tags[has_won]
            buckets = np.where(is_free, buckets, _next_bucket(buckets))[~has_won]
            tags, slots, starts = tags[~has_won], slots[~has_won], starts[~has_won]

    def _split_for(self, num_keys: int) -> None:
        """Splits segments until there is room for `num_keys`."""
        while True:
            share = num_keys / (self._round * _PLACES)
            progress = (share - _FIRST_SPLIT) / (_LAST_SPLIT - _FIRST_SPLIT)
            wanted = min(self._round, math.ceil(self._round * progress))
            num_split = self._num_segments - self._round
            if wanted <= num_split:
                return
            end = min(wanted, num_split + _MOST_SPLITS)
            self._add_segments(end - num_split)
            if end == self._round:
                self._round *= 2
            self._place_again(num_split, end)

    def _add_segments(self, count: int) -> None:
        first = self._num_segments
        self._tags.grow(first + count)
        self._slots.grow(first + count)
        self._tags.array[first : first + count] = _EMPTY
        self._num_segments += count

    def _place_again(self, begin: int, end: int) -> None:
        """Takes the keys out of segments, and puts each into its present segment."""
        part = slice(begin, end)
        slots = self._slots.array[part][self._tags.array[part] < _EMPTY]
        self._tags.array[part] = _EMPTY
        for first in range(0, len(slots), _CHUNK):
            own = slots[first : first + _CHUNK]
            buckets, tags = self._home(self.keys[own])
            self._put(buckets, tags.astype(np.uint8), own)


def _taken(array: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns elements; zeros of an array that has none yet."""
    return np.take(array, places) if len(array) else np.zeros(len(places), array.dtype)


def _equal(words: np.ndarray, tags: np.ndarray) -> np.ndarray:
    """Returns words with the highest bit set in each byte equal to that of `tags`.

    A byte above an equal one may be set by mistake: keys are compared afterwards.
    """
    different = words ^ tags
    return (different - _ONES) & ~different & _HIGH


def _empty(words: np.ndarray) -> np.ndarray:
    """Returns words with the highest bit set in each byte that is `_EMPTY`, not `_REMOVED`."""
    return words & ~(words << _SECOND_BIT) & _HIGH


def _first_byte(words: np.ndarray) -> np.ndarray:
    """Returns the number of the lowest byte with its highest bit set; undefined without one."""
    below = (words & (~words + _ONE)) - _ONE
    return (np.bitwise_count(below) >> 3).astype(np.int64) & 7


def _next_bucket(buckets: np.ndarray) -> np.ndarray:
    """Returns the next buckets, within their segments."""
    return (buckets & ~(_BUCKETS - 1)) | ((buckets + 1) & (_BUCKETS - 1))
