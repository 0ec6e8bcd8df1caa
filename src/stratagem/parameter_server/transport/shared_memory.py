"""Memory that a client and a server on one machine both map, by which large arrays go.

A socket copies what is sent into the kernel and out again, and not to where an array may begin for
JAX, which copies it once more. Here a sender copies once, and the receiver reads it in place.

It is the client's, anonymous, and never shrinks; the server opens it by its number in the client's
process. Only who knows the password of the Unix socket is asked to, and what was opened begins with
the word that was told: another process of that number, in another namespace, has another.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import mmap
import os
import secrets
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["ClientMemory", "ServerMemory", "is_placed", "large_bytes"]

# JAX uses an array in place only where it begins at such an address.
_ALIGNMENT = 64
_WORD_BYTES = 32
_HEAD_BYTES = 4096  # the word, and after it whether the client still uses it
_LEAST_AREA_BYTES = 2**16
# Smaller messages cost as much by a socket; larger ones are rare and would fill the memory.
_LEAST_BYTES, _MOST_BYTES = 2**16, 2**24
# A client keeps the values of its last answers while it computes with them.
_ANSWERS = 3
# Of what is told before a message: a mark, the beginning of the word of the memory, where frames
# begin, how many there are, and how many places of earlier answers are free again.
_PLACES = struct.Struct("<8s8sQII")
_MARK = b"placed\0\0"
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0)


def large_bytes(frames: Sequence[Any]) -> int:
    """Returns how many bytes of a message would go by shared memory; 0 if it had better not.

    Args:
        frames: the message.
    """
    size = sum(_padded(len(frame)) for frame in frames[1:])
    return size if _LEAST_BYTES <= size <= _MOST_BYTES else 0


def is_placed(frames: Sequence[Any]) -> bool:
    """Returns True for a message with arrays in shared memory.

    Args:
        frames: what has arrived.
    """
    return bool(frames) and bytes(frames[0][:8]) == _MARK


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Description of a client's memory, as JSON.

    Args:
        pid: of the client.
        file: its number there.
        word: at the beginning.
        requests_bytes: of the part that the client writes.
        answers_bytes: of the part that the server writes.
    """

    pid: int
    file: int
    word: str
    requests_bytes: int
    answers_bytes: int

    @property
    def size_bytes(self) -> int:
        return _HEAD_BYTES + self.requests_bytes + self.answers_bytes

    @property
    def answers_begin(self) -> int:
        return _HEAD_BYTES + self.requests_bytes

    @property
    def name(self) -> bytes:
        return self.word.encode()[:8]


class ClientMemory:
    """The client's side, for one connection, by which one request goes at a time.

    Args:
        request_bytes: of the largest request so far.
        answer_bytes: of the largest answer so far.

    Raises:
        OSError: there is no such memory on this system.
    """

    def __init__(self, request_bytes: int, answer_bytes: int) -> None:
        if not hasattr(os, "memfd_create") or not _SEALS:
            raise OSError("anonymous files are a thing of Linux")
        self._file = os.memfd_create("stratagem", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self.plan = _Plan(
                os.getpid(),
                self._file,
                secrets.token_hex(_WORD_BYTES // 2),
                _area_bytes(request_bytes),
                _area_bytes(_ANSWERS * answer_bytes),
            )
            os.ftruncate(self._file, self.plan.size_bytes)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._file, self.plan.size_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self._map[: _WORD_BYTES + 1] = self.plan.word.encode() + b"\1"
        self._requests = np.frombuffer(
            self._map, np.uint8, self.plan.requests_bytes, offset=_HEAD_BYTES
        )
        # Where answers were that nobody reads any more; noted by whichever thread drops the last.
        self._free: deque[int] = deque()

    @property
    def told(self) -> bytes:
        """Description with which a server opens it."""
        return json.dumps(dataclasses.asdict(self.plan)).encode()

    def has_room(self, request_bytes: int, answer_bytes: int) -> bool:
        """Returns True if it is large enough.

        Args:
            request_bytes: of the largest request so far.
            answer_bytes: of the largest answer so far.
        """
        plan = self.plan
        return (
            request_bytes <= plan.requests_bytes and _ANSWERS * answer_bytes <= plan.answers_bytes
        )

    def placed(self, frames: Sequence[Any]) -> list[Any]:
        """Returns a request as it is sent, with its arrays in this memory.

        Args:
            frames: the request; the one before was answered.
        """
        freed = [self._free.popleft() for _ in range(len(self._free))]
        size = large_bytes(frames)
        if size and size <= len(self._requests):
            return _placed(self.plan, frames, _HEAD_BYTES, self._requests, freed)
        return [_told(self.plan, 0, [], freed), *frames]

    def read(self, frames: Sequence[Any]) -> list[Any]:
        """Returns an answer, which may be read in place for as long as anybody has a part of it.

        Args:
            frames: as they arrived.
        """
        begin, sizes, _ = _places(self.plan, frames[0])
        if not sizes:
            return [*frames[1:]]
        _check(begin, sizes, self.plan.answers_begin, self.plan.size_bytes)
        whole = np.frombuffer(self._map, np.uint8, _span(sizes), offset=begin)
        weakref.finalize(whole, self._free.append, begin).atexit = False
        return [*frames[1:], *_parts(whole, sizes)]

    def close(self) -> None:
        """Lets the server forget it; arrays that were read stay."""
        if self._file >= 0 and self.plan.pid == os.getpid():
            self._map[_WORD_BYTES] = 0
            os.close(self._file)
        self._file = -1


class ServerMemory:
    """The server's side.

    Args:
        told: what the client has told.

    Raises:
        OSError: it cannot be opened from here. ValueError: it is not what was told.
    """

    def __init__(self, told: bytes) -> None:
        plan = self._plan = _Plan(**json.loads(told))
        file = os.open(f"/proc/{plan.pid:d}/fd/{plan.file:d}", os.O_RDWR | os.O_CLOEXEC)
        try:
            # One that could shrink would end this process when it is read.
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS:
                raise ValueError("memory that may shrink")
            self._map = mmap.mmap(file, plan.size_bytes)
        finally:
            os.close(file)
        if bytes(self._map[:_WORD_BYTES]) != plan.word.encode():
            raise ValueError("another memory than was told")
        self._answers = np.frombuffer(
            self._map, np.uint8, plan.answers_bytes, offset=plan.answers_begin
        )
        self._taken: list[tuple[int, int]] = []  # begin and end, in order

    @property
    def is_in_use(self) -> bool:
        """True if the client runs and has not closed it."""
        return self._map[_WORD_BYTES] == 1 and os.path.exists(f"/proc/{self._plan.pid}")

    def read(self, frames: Sequence[Any]) -> list[Any]:
        """Returns a request, which may be read in place until it is answered.

        Args:
            frames: as they arrived.

        Raises:
            ConnectionError: it is not within this memory.
        """
        begin, sizes, freed = _places(self._plan, frames[0])
        self._taken = [part for part in self._taken if part[0] not in freed]
        if not sizes:
            return [*frames[1:]]
        _check(begin, sizes, _HEAD_BYTES, self._plan.answers_begin)
        whole = np.frombuffer(self._map, np.uint8, _span(sizes), offset=begin)
        return [*frames[1:], *_parts(whole, sizes)]

    def placed(self, frames: Sequence[Any]) -> list[Any]:
        """Returns an answer as it is sent: with its arrays in this memory, where there is room.

        Args:
            frames: the answer.
        """
        size = large_bytes(frames)
        begin = self._take(size) if size else None
        if begin is None:
            return [*frames]
        at = begin - self._plan.answers_begin
        return _placed(self._plan, frames, begin, self._answers[at : at + size], [])

    def _take(self, size: int) -> int | None:
        """The first place that is free; the lowest, so that few pages are ever used."""
        begin = self._plan.answers_begin
        for place, (taken, end) in enumerate([*self._taken, (self._plan.size_bytes, 0)]):
            if begin + size <= taken:
                self._taken.insert(place, (begin, begin + size))
                return begin
            begin = end
        return None


def _placed(
    plan: _Plan, frames: Sequence[Any], begin: int, room: np.ndarray, freed: list[int]
) -> list[Any]:
    """Copies all frames but the first into the room, and tells so before it."""
    sizes = [len(frame) for frame in frames[1:]]
    for part, frame in zip(_parts(room, sizes), frames[1:], strict=True):
        part[:] = np.frombuffer(frame, np.uint8)
    return [_told(plan, begin, sizes, freed), frames[0]]


def _parts(whole: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    parts: list[np.ndarray] = []
    at = 0
    for size in sizes:
        parts.append(whole[at : at + size])
        at += _padded(size)
    return parts


def _told(plan: _Plan, begin: int, sizes: Sequence[int], freed: Sequence[int]) -> bytes:
    numbers = [*sizes, *freed]
    head = _PLACES.pack(_MARK, plan.name, begin, len(sizes), len(freed))
    return head + struct.pack(f"<{len(numbers)}Q", *numbers)


def _places(plan: _Plan, told: Any) -> tuple[int, list[int], list[int]]:
    told = bytes(told)
    try:
        _, name, begin, num_sizes, num_freed = _PLACES.unpack_from(told)
        numbers = struct.unpack_from(f"<{num_sizes + num_freed}Q", told, _PLACES.size)
    except struct.error as error:
        raise ConnectionError(f"a message that is none of this library's ({error})") from error
    if name != plan.name:
        raise ConnectionError("a message that is in another memory than the one that is shared")
    return begin, list(numbers[:num_sizes]), list(numbers[num_sizes:])


def _check(begin: int, sizes: Sequence[int], least: int, limit: int) -> None:
    if begin < least or begin % _ALIGNMENT or begin + _span(sizes) > limit:
        raise ConnectionError("a message that is not within the memory that is shared for it")


def _span(sizes: Sequence[int]) -> int:
    return sum(map(_padded, sizes))


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _area_bytes(size: int) -> int:
    """The next power of two, so that what is a little larger next time still fits."""
    return max(_LEAST_AREA_BYTES, 1 << max(0, size - 1).bit_length())
