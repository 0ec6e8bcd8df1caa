"""Shared memory for large arrays between a client and a server on one machine.

A socket copies data into the kernel and out again, to an address that JAX may have to copy once
more for alignment. With shared memory the sender copies once, and the receiver reads in place.

The client creates anonymous memory that cannot shrink. The server opens it through the client's
/proc entry. Only clients that can open the Unix socket can offer memory, and its first bytes must
match the offered word: in another namespace, the same process id is another process.
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
from typing import Any, SupportsBytes

import numpy as np

# JAX uses an array in place only if its address is aligned to this.
_ALIGNMENT = 64
_WORD_BYTES = 32
_HEAD_BYTES = 4096  # the word, then a flag: still in use by the client
_LEAST_AREA_BYTES = 2**16
_LEAST_BYTES = 2**16  # smaller messages are as fast on a socket
# Header before a message: mark, prefix of the memory's word, offset of the first frame, number of
# frames, and number of freed earlier answers.
_PLACES = struct.Struct("<8s8sQII")
_MARK = b"placed\0\0"
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0)


@dataclasses.dataclass(frozen=True)
class MemoryLimits:
    """Limits of the shared memory of one connection.

    Messages beyond them go through the socket, so a client that keeps its answers costs no more.

    Args:
        most_bytes: size of the largest message. In most jobs, larger ones are rare, and would make
            the memory large for the rest of it.
        num_answers: answers of the largest size that there is room for. A client references the
            values of its last answers while it computes with them.
    """

    most_bytes: int = 2**24
    num_answers: int = 3


DEFAULT_LIMITS = MemoryLimits()


def large_bytes(frames: Sequence[Any], most_bytes: int = DEFAULT_LIMITS.most_bytes) -> int:
    """Returns the message's size in shared memory in bytes; 0 if a socket suits it better."""
    size = sum(_padded(len(frame)) for frame in frames[1:])
    return size if _LEAST_BYTES <= size <= most_bytes else 0


def is_placed(frames: Sequence[Any]) -> bool:
    """Returns True if a message has arrays in shared memory."""
    return bool(frames) and bytes(frames[0][:8]) == _MARK


@dataclasses.dataclass(frozen=True)
class _MemoryLayout:
    """Layout of a client's memory, sent as JSON.

    Args:
        pid: process id of the client.
        file: file descriptor in the client.
        word: random identifier stored at the beginning.
        requests_bytes: size of the area that the client writes.
        answers_bytes: size of the area that the server writes.
        most_bytes: size of the largest message.
    """

    pid: int
    file: int
    word: str
    requests_bytes: int
    answers_bytes: int
    most_bytes: int

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
    """Client side, for one connection with one request at a time.

    Args:
        request_bytes: size of the largest request so far.
        answer_bytes: size of the largest answer so far.
        limits: what goes by the memory.

    Raises:
        OSError: the system does not support such memory.
    """

    def __init__(
        self, request_bytes: int, answer_bytes: int, limits: MemoryLimits = DEFAULT_LIMITS
    ) -> None:
        if not hasattr(os, "memfd_create") or not _SEALS:
            raise OSError("anonymous files with seals exist only on Linux")
        self._limits = limits
        self._file = os.memfd_create("stratagem", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self.plan = _MemoryLayout(
                os.getpid(),
                self._file,
                secrets.token_hex(_WORD_BYTES // 2),
                _area_bytes(request_bytes),
                _area_bytes(limits.num_answers * answer_bytes),
                limits.most_bytes,
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
        # Offsets of released answers; appended by the thread that drops the last reference.
        self._free: deque[int] = deque()

    @property
    def offer(self) -> bytes:
        """Description with which a server opens it."""
        return json.dumps(dataclasses.asdict(self.plan)).encode()

    def has_room(self, request_bytes: int, answer_bytes: int) -> bool:
        """Returns True if requests and answers of these sizes fit."""
        answers_bytes = self._limits.num_answers * answer_bytes
        return (
            request_bytes <= self.plan.requests_bytes and answers_bytes <= self.plan.answers_bytes
        )

    def placed(self, frames: Sequence[Any]) -> list[Any]:
        """Returns the frames to send, with the arrays moved to this memory.

        The previous request must have been answered.
        """
        freed = [self._free.popleft() for _ in range(len(self._free))]
        size = large_bytes(frames, self._limits.most_bytes)
        if size and size <= len(self._requests):
            return _placed(self.plan, frames, _HEAD_BYTES, self._requests, freed)
        return [_encoded_places(self.plan, 0, [], freed), *frames]

    def read(self, frames: Sequence[Any]) -> list[Any]:
        """Returns an answer's frames, valid for as long as any of them is referenced."""
        begin, sizes, _ = _places(self.plan, frames[0])
        if not sizes:
            return [*frames[1:]]
        _check(begin, sizes, self.plan.answers_begin, self.plan.size_bytes)
        whole = np.frombuffer(self._map, np.uint8, _span(sizes), offset=begin)
        weakref.finalize(whole, self._free.append, begin).atexit = False
        return [*frames[1:], *_parts(whole, sizes)]

    def close(self) -> None:
        """Releases the memory on the server; arrays that were read stay valid."""
        if self._file >= 0 and self.plan.pid == os.getpid():
            self._map[_WORD_BYTES] = 0
            os.close(self._file)
        self._file = -1


class ServerMemory:
    """Server side, opened from `ClientMemory.offer`.

    Raises:
        OSError: it cannot be opened from this process.
        ValueError: the memory does not match its description, or can shrink.
    """

    def __init__(self, offer: bytes) -> None:
        plan = self._plan = _MemoryLayout(**json.loads(offer))
        file = os.open(f"/proc/{plan.pid:d}/fd/{plan.file:d}", os.O_RDWR | os.O_CLOEXEC)
        try:
            # Reading memory that shrank would kill this process.
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS:
                raise ValueError("the memory is not sealed: it could shrink")
            self._map = mmap.mmap(file, plan.size_bytes)
        finally:
            os.close(file)
        if bytes(self._map[:_WORD_BYTES]) != plan.word.encode():
            raise ValueError("the memory has another identifier than its description")
        self._answers = np.frombuffer(
            self._map, np.uint8, plan.answers_bytes, offset=plan.answers_begin
        )
        self._taken: list[tuple[int, int]] = []  # sorted (begin, end)

    @property
    def is_in_use(self) -> bool:
        """True if the client is running and has not closed the memory."""
        return self._map[_WORD_BYTES] == 1 and os.path.exists(f"/proc/{self._plan.pid}")

    def read(self, frames: Sequence[Any]) -> list[Any]:
        """Returns a request's frames, valid until it is answered.

        Raises:
            ConnectionError: the frames lie outside this memory.
        """
        begin, sizes, freed = _places(self._plan, frames[0])
        self._taken = [part for part in self._taken if part[0] not in freed]
        if not sizes:
            return [*frames[1:]]
        _check(begin, sizes, _HEAD_BYTES, self._plan.answers_begin)
        whole = np.frombuffer(self._map, np.uint8, _span(sizes), offset=begin)
        return [*frames[1:], *_parts(whole, sizes)]

    def placed(self, frames: Sequence[Any]) -> list[Any]:
        """Returns the frames to send, with the arrays in this memory if they fit."""
        size = large_bytes(frames, self._plan.most_bytes)
        begin = self._take(size) if size else None
        if begin is None:
            return [*frames]
        at = begin - self._plan.answers_begin
        return _placed(self._plan, frames, begin, self._answers[at : at + size], [])

    def _take(self, size: int) -> int | None:
        """Reserves and returns the lowest free offset, so that few pages are ever touched."""
        begin = self._plan.answers_begin
        for place, (taken, end) in enumerate([*self._taken, (self._plan.size_bytes, 0)]):
            if begin + size <= taken:
                self._taken.insert(place, (begin, begin + size))
                return begin
            begin = end
        return None


def _placed(
    plan: _MemoryLayout, frames: Sequence[Any], begin: int, room: np.ndarray, freed: list[int]
) -> list[Any]:
    """Copies all frames but the first into `room`, and prepends their description."""
    sizes = [len(frame) for frame in frames[1:]]
    for part, frame in zip(_parts(room, sizes), frames[1:], strict=True):
        part[:] = np.frombuffer(frame, np.uint8)
    return [_encoded_places(plan, begin, sizes, freed), frames[0]]


def _parts(whole: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    parts: list[np.ndarray] = []
    at = 0
    for size in sizes:
        parts.append(whole[at : at + size])
        at += _padded(size)
    return parts


def _encoded_places(
    plan: _MemoryLayout, begin: int, sizes: Sequence[int], freed: Sequence[int]
) -> bytes:
    numbers = [*sizes, *freed]
    head = _PLACES.pack(_MARK, plan.name, begin, len(sizes), len(freed))
    return head + struct.pack(f"<{len(numbers)}Q", *numbers)


def _places(plan: _MemoryLayout, frame: SupportsBytes) -> tuple[int, list[int], list[int]]:
    frame = bytes(frame)
    try:
        _, name, begin, num_sizes, num_freed = _PLACES.unpack_from(frame)
        numbers = struct.unpack_from(f"<{num_sizes + num_freed}Q", frame, _PLACES.size)
    except struct.error as error:
        raise ConnectionError(f"received an invalid message ({error})") from error
    if name != plan.name:
        raise ConnectionError("received a message in memory that is not shared")
    return begin, list(numbers[:num_sizes]), list(numbers[num_sizes:])


def _check(begin: int, sizes: Sequence[int], least: int, limit: int) -> None:
    if begin < least or begin % _ALIGNMENT or begin + _span(sizes) > limit:
        raise ConnectionError("received a message outside the shared memory")


def _span(sizes: Sequence[int]) -> int:
    return sum(map(_padded, sizes))


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _area_bytes(size: int) -> int:
    """Rounds up to a power of two, so that a slightly larger message still fits."""
    return max(_LEAST_AREA_BYTES, 1 << max(0, size - 1).bit_length())
