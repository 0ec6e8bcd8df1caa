"""Connections between all members of one view, and swaps of buffers over them.

A view has connections of its own. So nothing of a broken round is left in them.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.observe.wait_clock import WaitClock, wait_clock

# The end of sockets that another thread may be using.


def close_after_use(sockets: Iterable[socket.socket], use: threading.RLock) -> None:
    """Ends connections, and closes them once no thread holds `use`.

    The number of a closed file belongs to the next one that any thread opens: a thread that still
    reads or writes would do so on a connection of another.
    """
    sockets = list(sockets)
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # wakes the thread that uses it
    with use:
        for one in sockets:
            one.close()


# Time of the operations of an elastic group: waiting for members, and values in transit.
#
# An operation begins when this member has computed its values. It then waits until the last of the
# others has sent its first bytes. The rest of the operation is sending, receiving and adding.
#


class ExchangeTimes:
    """Adds the times of operations to a clock."""

    def __init__(self, clock: WaitClock = wait_clock) -> None:
        self._clock = clock
        self._begin_s = self._swap_s = self._waited_s = 0.0
        self._counts_peers = False
        self._heard_s: dict[int, float] = {}
        clock.measures_transfers = True

    def close(self) -> None:
        """Ends the measurement: later steps of this process may be those of another strategy."""
        self._clock.measures_transfers = False

    def begin_operation(self, *, follows_work: bool) -> None:
        """Begins an operation; one that does not follow own work waits for values in transit."""
        self._begin_s, self._waited_s = time.monotonic(), 0.0
        self._counts_peers = follows_work

    def end_operation(self) -> None:
        """Ends it, also with an error."""
        self._clock.peers_s += self._waited_s
        self._clock.transfer_s += time.monotonic() - self._begin_s - self._waited_s

    def begin_swap(self) -> None:
        """Begins to swap buffers with the other members; an operation may do so twice."""
        self._swap_s = time.monotonic()
        self._heard_s.clear()

    def hear(self, peer: int) -> None:
        """Notes that bytes of a member have arrived."""
        if peer not in self._heard_s:
            self._heard_s[peer] = time.monotonic()

    def end_swap(self) -> None:
        """Ends the swap."""
        if self._counts_peers and self._heard_s:
            self._waited_s += max(self._heard_s.values()) - self._swap_s
        self._counts_peers = False


# View, round, operation in the round, name of the round, bytes that follow.
_HEADER = struct.Struct("!IQIIQ")
_POLL_S = 0.2
# Below this size every member sends its whole array to all others, which takes one message less.
_SMALL_BYTES = 2**16
_MOST_BUFFERS = 512  # in one call; Linux takes 1,024

Brokenness = Callable[[float], None]
"""Called with the seconds waited; raises PeerLostError if the view is broken."""


class PeerLostError(ConnectionError):
    """The view is broken: a member was lost, or has left the view because another was."""


class DivergedError(RuntimeError):
    """Members made different calls."""


class PeerConnections:
    """Non-blocking sockets to the other members of a view.

    One thread uses them; any thread may close them.
    """

    def __init__(
        self,
        view: int,
        members: Sequence[int],
        own: int,
        sockets: Mapping[int, socket.socket],
        check: Brokenness,
        times: ExchangeTimes | None = None,
    ) -> None:
        self._view, self._members, self._own = view, tuple(members), own
        self._sockets = dict(sockets)
        self._check, self._times = check, times or ExchangeTimes(WaitClock())
        self._round, self._name, self._op = 0, "", 0
        self._use = threading.RLock()
        for one in self._sockets.values():
            one.settimeout(0)

    def begin_round(self, number: int, name: str) -> None:
        """Starts the count of operations; all members use the same number and name."""
        self._round, self._name, self._op = number, name, 0

    def close(self) -> None:
        """Closes all connections, by which the other members learn that the view is broken."""
        close_after_use(self._sockets.values(), self._use)

    def barrier(self, flag: int = 0) -> list[int]:
        """Returns the flags of all members, each a byte, once all have called it."""
        return self._gather_array(np.array([flag], np.uint8))[:, 0].tolist()

    def broadcast(self, source: int, targets: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fills the buffers of some members from those of one; all members call it."""
        outgoing = {target: buffers for target in targets if self._own == source}
        self._swap(outgoing, {source: buffers} if self._own in targets else {})

    def gather(self, content: bytes) -> list[bytes]:
        """Returns the bytes of all members, in the order of members."""
        sizes = self._gather_array(np.array([len(content)], np.uint64))
        received = {
            peer: np.empty(int(size), np.uint8)
            for peer, size in zip(self._members, sizes[:, 0], strict=True)
            if peer != self._own
        }
        own = memoryview(content)
        self._swap(
            {peer: [own] for peer in self._sockets},
            {peer: [bytes_of(array)] for peer, array in received.items()},
        )
        return [
            content if peer == self._own else received[peer].tobytes() for peer in self._members
        ]

    def gather_into(self, own: np.ndarray[Any, Any], everyone: np.ndarray[Any, Any]) -> None:
        """Writes the flat arrays of all members to the rows of a contiguous array."""
        rows = everyone.reshape(len(self._members), own.size)
        rows[self._members.index(self._own)] = own
        self._swap(
            {peer: [bytes_of(own)] for peer in self._sockets},
            {peer: [bytes_of(rows[self._members.index(peer)])] for peer in self._sockets},
        )

    def _gather_array(self, own: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        everyone = np.empty((len(self._members), own.size), own.dtype)
        self.gather_into(own, everyone)
        return everyone

    def all_to_all(self, own: np.ndarray[Any, Any], received: np.ndarray[Any, Any]) -> None:
        """Writes row r of member i to row i of member r; arrays are flat and contiguous."""
        count = len(self._members)
        rows, results = own.reshape(count, -1), received.reshape(count, -1)
        rank = self._members.index(self._own)
        results[rank] = rows[rank]
        others = [(place, peer) for place, peer in enumerate(self._members) if peer != self._own]
        self._swap(
            {peer: [bytes_of(rows[place])] for place, peer in others},
            {peer: [bytes_of(results[place])] for place, peer in others},
        )

    def reduce(
        self, own: np.ndarray[Any, Any], total: np.ndarray[Any, Any], ufunc: np.ufunc
    ) -> None:
        """Writes the sum, or another combination, over members to `total`; arrays are flat.

        Every element is combined in the order of members, so the result is bitwise equal on all.
        """
        if own.nbytes <= _SMALL_BYTES:
            _combine([*self._gather_array(own)], total, ufunc)
            return
        count = len(self._members)
        rank = self._members.index(self._own)
        bounds = [own.size * place // count for place in range(count + 1)]
        shards = [slice(bounds[place], bounds[place + 1]) for place in range(count)]
        others = [(place, peer) for place, peer in enumerate(self._members) if peer != self._own]
        addends: list[Any] = [None] * count
        addends[rank] = own[shards[rank]]
        for place, _ in others:
            addends[place] = np.empty(addends[rank].size, own.dtype)
        self._swap(
            {peer: [bytes_of(own[shards[place]])] for place, peer in others},
            {peer: [bytes_of(addends[place])] for place, peer in others},
        )
        _combine(addends, total[shards[rank]], ufunc)
        self._swap(
            {peer: [bytes_of(total[shards[rank]])] for _, peer in others},
            {peer: [bytes_of(total[shards[place]])] for place, peer in others},
        )

    def _swap(
        self,
        outgoing: Mapping[int, Sequence[memoryview]],
        incoming: Mapping[int, Sequence[memoryview]],
    ) -> None:
        """Sends buffers to peers while it fills those from them."""
        self._op += 1
        name = zlib.crc32(self._name.encode())
        sending: dict[int, list[memoryview]] = {}
        receiving: dict[int, _Incoming] = {}
        for peer, buffers in outgoing.items():
            size = sum(buffer.nbytes for buffer in buffers)
            header = _HEADER.pack(self._view, self._round, self._op, name, size)
            sending[peer] = [memoryview(header), *(one for one in buffers if one.nbytes)]
        for peer, buffers in incoming.items():
            size = sum(buffer.nbytes for buffer in buffers)
            expected = _HEADER.pack(self._view, self._round, self._op, name, size)
            receiving[peer] = _Incoming(expected, [one for one in buffers if one.nbytes])
        self._transfer(sending, receiving)

    def _transfer(
        self, sending: dict[int, list[memoryview]], receiving: dict[int, _Incoming]
    ) -> None:
        begun_s = time.monotonic()
        self._times.begin_swap()
        with self._use:
            while sending or receiving:
                moved = False
                for peer in list(sending):
                    moved |= self._send(peer, sending)
                for peer in list(receiving):
                    moved |= self._receive(peer, receiving)
                if not moved:
                    self._wait(sending.keys(), receiving.keys())
                    waited_s = time.monotonic() - begun_s
                    if waited_s > _POLL_S:
                        self._check(waited_s)
        self._times.end_swap()

    def _send(self, peer: int, sending: dict[int, list[memoryview]]) -> bool:
        buffers = sending[peer]
        try:
            count = self._sockets[peer].sendmsg(buffers[:_MOST_BUFFERS])
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLostError(f"process {peer} cannot be reached: {error}") from error
        while buffers and count >= buffers[0].nbytes:
            count -= buffers.pop(0).nbytes
        if buffers:
            buffers[0] = buffers[0][count:]
        else:
            del sending[peer]
        return True

    def _receive(self, peer: int, receiving: dict[int, _Incoming]) -> bool:
        state = receiving[peer]
        try:
            count = self._sockets[peer].recv_into(state.target)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLostError(f"process {peer} cannot be reached: {error}") from error
        self._times.hear(peer)
        if not count:
            raise PeerLostError(f"process {peer} closed its connection")
        if state.advance(count, peer):
            del receiving[peer]
        return True

    def _wait(self, sending: Any, receiving: Any) -> None:
        poller = select.poll()
        for peer, one in self._sockets.items():
            events = (select.POLLOUT if peer in sending else 0) | (
                select.POLLIN if peer in receiving else 0
            )
            if events:
                poller.register(one, events)
        poller.poll(_POLL_S * 1000)


class _Incoming:
    """A message that is being received: its header first."""

    def __init__(self, expected: bytes, buffers: list[memoryview]) -> None:
        self._expected = expected
        self._header = bytearray(len(expected))
        parts = [memoryview(self._header), *buffers]
        self._targets = [one for one in parts if one.nbytes]

    @property
    def target(self) -> memoryview:
        """Memory for the next bytes."""
        return self._targets[0]

    def advance(self, count: int, peer: int) -> bool:
        """Counts received bytes; True if the message is complete. Raises DivergedError."""
        is_header = self._targets[0].obj is self._header
        self._targets[0] = self._targets[0][count:]
        if not self._targets[0].nbytes:
            del self._targets[0]
            if is_header and bytes(self._header) != self._expected:
                raise DivergedError(_difference(bytes(self._header), self._expected, peer))
        return not self._targets


def _difference(received: bytes, expected: bytes, peer: int) -> str:
    names = ("view", "round", "operation", "name", "size in bytes")
    theirs, ours = _HEADER.unpack(received), _HEADER.unpack(expected)
    differing = [
        f"{name} {one} and {other}"
        for name, one, other in zip(names, theirs, ours, strict=True)
        if one != other
    ]
    return f"process {peer} and this one differ: {', '.join(differing)}"


def _combine(
    addends: Sequence[np.ndarray[Any, Any]], total: np.ndarray[Any, Any], ufunc: np.ufunc
) -> None:
    if len(addends) == 1:
        total[...] = addends[0]
        return
    # `total` may be the memory of an addend of this process, which is not the first on all.
    first = addends[0] + addends[1] if ufunc is np.add else ufunc(addends[0], addends[1])
    for addend in addends[2:]:
        ufunc(first, addend, out=first)
    total[...] = first


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """Returns the memory of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
