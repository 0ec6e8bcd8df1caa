"""Arrays that go by memory which a client and a server both map, in place of a socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.group.transport import listener as listener_module
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.listener import ClientMemories, Listener, Request
from stratagem.group.transport.shared_memory import (
    ClientMemory,
    MemoryLimits,
    ServerMemory,
    is_placed,
    large_bytes,
)
from stratagem.group.transport.wire import SHARED, Message, pack, unpack
from stratagem.input.batch_messages import pack_batch, unpack_batch
from tests.unit.launch.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems go without")

KIB = 1024


def frames_of(*sizes: int, seed: int = 0) -> list[np.ndarray]:
    """A message: a header, which stays as it is, and arrays of random bytes."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, np.uint8) for size in (40, *sizes)]


def same(got: list, wanted: list) -> bool:
    return len(got) == len(wanted) and all(map(np.array_equal, map(np.asarray, got), wanted))


@pytest.fixture
def client() -> Iterator[ClientMemory]:
    memory = ClientMemory(256 * KIB, 256 * KIB)
    yield memory
    memory.close()


@pytest.fixture
def server(client) -> ServerMemory:
    return ServerMemory(client.offer)


def test_requests_and_answers_come_as_they_went(client, server) -> None:
    request, answer = frames_of(100 * KIB, 1, 3000), frames_of(200 * KIB, 5 * KIB, seed=1)
    placed = client.placed(request)
    assert sum(map(len, placed)) < 200
    got = server.read(placed)
    assert same(got, request)
    assert all(frame.ctypes.data % 64 == 0 for frame in got[1:])
    placed = server.placed(answer)
    assert sum(map(len, placed)) < 200
    assert same(client.read(placed), answer)


def test_answers_stay_while_somebody_has_a_part_of_them(client, server) -> None:
    kept = []
    for number in range(5):  # of 200 KiB each, in 1 MiB
        frames = frames_of(200 * KIB, 100, seed=number)
        read = client.read(server.placed(frames))
        kept.append((frames[2], read[2]))
    assert not is_placed(server.placed(frames_of(200 * KIB)))  # there is room for no more
    for wanted, part in kept:
        np.testing.assert_array_equal(part, wanted)


def test_room_of_answers_is_used_again_when_nobody_has_them(client, server) -> None:
    for number in range(50):
        frames = frames_of(200 * KIB, seed=number)
        placed = server.placed(frames)
        assert is_placed(placed)
        assert same(client.read(placed), frames)
        server.read(client.placed(frames_of(10)))  # by which it hears what is free


@given(st.lists(st.tuples(st.integers(64, 300), st.booleans()), max_size=40))
def test_answers_never_overlap(answers) -> None:
    client = ClientMemory(1, 256 * KIB)
    server = ServerMemory(client.offer)
    held = []
    for number, (size_kib, is_dropped) in enumerate(answers):
        frames = [b"", np.full(size_kib * KIB, number % 251, np.uint8)]
        placed = server.placed(frames)
        if is_placed(placed):
            held.append((number, client.read(placed)[1]))
        if is_dropped and held:
            del held[len(held) // 2]
            server.read(client.placed([b""]))
        for wanted, array in held:
            assert (array == wanted % 251).all()
    client.close()


@pytest.mark.parametrize("sizes", [(), (10,), (KIB, KIB), (2**24 + 1,), (2**24, 1)])
def test_small_and_very_large_messages_go_as_they_are(client, server, sizes) -> None:
    frames = frames_of(*sizes)
    assert large_bytes(frames) == 0
    assert same(server.read(client.placed(frames)), frames)
    assert same(server.placed(frames), frames)


def test_requests_without_room_go_as_they_are(client, server) -> None:
    frames = frames_of(257 * KIB)
    assert not client.has_room(257 * KIB, 0)
    assert same(server.read(client.placed(frames)), frames)
    assert client.has_room(256 * KIB, 256 * KIB)
    assert not client.has_room(0, 400 * KIB)


def test_limits_are_those_of_the_connection() -> None:
    """The server follows the client's limits, which come with its offer."""
    client = ClientMemory(KIB, 300 * KIB, MemoryLimits(most_bytes=300 * KIB, num_answers=5))
    server = ServerMemory(client.offer)
    assert client.has_room(0, 2048 // 5 * KIB)
    assert not client.has_room(0, 2050 // 5 * KIB)
    too_large = frames_of(301 * KIB)
    assert same(server.placed(too_large), too_large)
    held = []
    for number in range(6):
        frames = frames_of(300 * KIB, seed=number)
        placed = server.placed(frames)
        assert is_placed(placed)
        held.append((frames, client.read(placed)))
    assert not is_placed(server.placed(frames_of(300 * KIB)))
    assert all(same(read, frames) for frames, read in held)
    client.close()


_TREE = {
    "large": np.arange(10_000_000, dtype=np.float32),
    "bf16": np.arange(7).astype(ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3), np.int16),
    "number": np.float64(0.1) * np.ones(()),
    "text": np.array(["a", "\u00e9", "long" * 1000]),
    "objects": np.array(["x", b"y", None, ""], object),
}


def test_large_batches_use_memory_that_is_released(monkeypatch) -> None:
    """40 MB batches of all kinds, bit for bit; held ones beyond the limit go by the socket."""
    places: list[bool] = []
    placed = ServerMemory.placed

    def noted(memory: ServerMemory, frames: Sequence[Any]) -> list[Any]:
        found = placed(memory, frames)
        places.append(is_placed(found))
        return found

    monkeypatch.setattr(ServerMemory, "placed", noted)
    keys = ClusterKeys.make()
    limits = MemoryLimits(most_bytes=2**26, num_answers=2)
    before_bytes = _mapped_bytes()
    with (
        Listener(keys, lambda request: request.answer(pack_batch(_TREE))) as listener,
        Connections(keys, [listener.addresses], memory_limits=limits) as connections,
    ):
        held = []
        for _ in range(8):
            batch = unpack_batch(connections.ask(0, Message("x"), timeout_s=60.0))
            held = [*held[-1:], batch]
            for one in held:
                assert one.keys() == _TREE.keys()
                for name, wanted in _TREE.items():
                    got = one[name]
                    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), name
                    if wanted.dtype == object:
                        assert got.tolist() == wanted.tolist()
                    else:
                        assert got.tobytes() == wanted.tobytes(), name
        assert places[-4:] == [True] * 4
        assert not held[-1]["large"].flags.writeable
        # The client and the server map one memory each, with room for two answers.
        assert _mapped_bytes() - before_bytes <= 2 * (2**27 + 2**17)
        kept = [connections.ask(0, Message("x"), timeout_s=60.0) for _ in range(4)]
        assert False in places[-4:]
        is_alive = weakref.ref(held[-1]["large"])
        del held, batch, one, got, kept
        assert is_alive() is None
    until(lambda: _mapped_bytes() <= before_bytes)


@pytest.mark.parametrize("flags", [0, os.MFD_ALLOW_SEALING])
def test_memory_that_may_shrink_or_is_not_the_offered_one_is_refused(client, flags) -> None:
    file = os.memfd_create("mine", flags)
    os.ftruncate(file, 2**20)
    for change, error, words in (
        ({"file": file}, ValueError, "the memory is not sealed"),
        ({"word": "0" * 32}, ValueError, "another identifier than its description"),
        ({"file": 10**6}, OSError, "No such file"),
    ):
        with pytest.raises(error, match=words):
            ServerMemory(json.dumps({**json.loads(client.offer), **change}).encode())
    os.close(file)


@pytest.mark.parametrize(
    "offer", [b"", b"[]", b"{}", b"{", b'{"pid": 1}', b"\xff", "sizes", "numbers"]
)
def test_invalid_offer_is_refused(client, offer) -> None:
    wrong = {"sizes": {"answers_bytes": 2**80}, "numbers": {"pid": "self/../1"}}
    if isinstance(offer, str):
        offer = json.dumps({**json.loads(client.offer), **wrong[offer]}).encode()
    assert ClientMemories().share(b"1", offer) == [SHARED, b""]


@pytest.mark.parametrize("begin", [0, 4095, 4096 + 64, 2**40])
def test_places_outside_of_the_memory_are_refused(client, server, begin) -> None:
    first, second = client.placed(frames_of(256 * KIB))
    outside = bytes(first[:16]) + begin.to_bytes(8, "little") + bytes(first[24:])
    with pytest.raises(ConnectionError, match="outside the shared memory"):
        server.read([outside, second])
    with pytest.raises(ConnectionError, match="received an invalid message"):
        server.read([first[:-1], second])


def test_messages_in_another_memory_are_refused(client, server) -> None:
    other = ClientMemory(256 * KIB, 256 * KIB)
    with pytest.raises(ConnectionError, match="in memory that is not shared"):
        server.read(other.placed(frames_of(200 * KIB)))
    with pytest.raises(ConnectionError, match="in memory that is not shared"):
        other.read(server.placed(frames_of(200 * KIB)))
    other.close()


def test_server_forgets_memory_that_its_client_has_closed() -> None:
    memories = ClientMemories()
    clients = [ClientMemory(KIB, KIB) for _ in range(3)]
    for number, client in enumerate(clients):
        assert memories.share(b"%d" % number, client.offer) == [SHARED, b"here"]
    assert len(memories) == 3
    clients[0].close()
    clients[2].close()
    assert memories.share(b"1", clients[1].offer) == [SHARED, b"here"]
    assert len(memories) == 1
    assert memories.share(b"1", clients[0].offer) == [SHARED, b""]
    assert len(memories) == 0
    assert not memories.can_read(b"1", clients[1].placed(frames_of(KIB)))
    assert memories.can_read(b"1", frames_of(KIB))
    clients[1].close()


_OFFER = """
from stratagem.group.transport.shared_memory import ClientMemory
memory = ClientMemory(1, 1)
print(memory.offer.decode(), flush=True)
input()
"""


def test_server_forgets_memory_whose_client_was_killed() -> None:
    command = [sys.executable, "-c", _OFFER]
    memories = ClientMemories()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        offer = process.stdout.readline()
        assert memories.share(b"theirs", offer) == [SHARED, b"here"]
        process.kill()
    client = ClientMemory(KIB, KIB)
    assert memories.share(b"ours", client.offer) == [SHARED, b"here"]
    assert len(memories) == 1
    client.close()


def test_arrays_outlive_the_memory_that_brought_them(client, server) -> None:
    message = Message("x", {}, [np.arange(50_000.0)])
    (array,) = unpack(client.read(server.placed(pack(message)))).arrays
    client.close()
    np.testing.assert_array_equal(array, np.arange(50_000.0))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("can_map", [True, False])
def test_connections_go_by_shared_memory_where_there_is_some(monkeypatch, can_map) -> None:
    """Answers that are kept are not written over, requests that change are not seen to."""
    if not can_map:
        monkeypatch.setattr(os, "memfd_create", _no_memory)
    places: list[int] = []

    def answer(request: Request) -> None:
        (array,) = request.message.arrays
        places.append(array.ctypes.data)
        request.answer(Message("x", {}, [array + 1, array[:3] * 2]))

    keys = ClusterKeys.make()
    kept = []
    array = np.empty(100_000, np.float32)
    with Listener(keys, answer) as listener, Connections(keys, [listener.addresses]) as connections:
        for number in range(40):
            array[:] = number
            got = connections.ask(0, Message("x", {}, [array]), timeout_s=60.0).arrays
            if number % 3 == 0:
                kept.append((number, got))
            del got
        assert bool(len(listener._memories)) == can_map
    assert not can_map or len(set(places[5:])) == 1
    for number, (whole, part) in kept:
        np.testing.assert_array_equal(whole, np.full(100_000, number + 1, np.float32))
        np.testing.assert_array_equal(part, np.full(3, 2 * number, np.float32))


def test_memory_grows_with_what_goes_by_it() -> None:
    """Each size is asked for several times: before, while and after a larger one is shared."""

    def answer(request: Request) -> None:
        (array,) = request.message.arrays
        size = request.message.fields["size"]
        request.answer(Message("x", {}, [array[:8] + 1, np.full(size, array[0], np.float32)]))

    keys = ClusterKeys.make()
    rng = np.random.default_rng(0)
    held = []
    with Listener(keys, answer) as listener, Connections(keys, [listener.addresses]) as connections:
        for number in range(60):
            limit = 10 ** int(3 + 4 * number / 60)
            asked, size = rng.integers(8, limit, 2)
            message = Message("x", {"size": int(size)}, [np.full(asked, number, np.float32)])
            first, second = connections.ask(0, message, timeout_s=60.0).arrays
            np.testing.assert_array_equal(first, np.full(8, number + 1.0))
            held = [*held[-2:], (number, second)]
            for wanted, array in held:
                np.testing.assert_array_equal(array, np.full(len(array), wanted))


def test_request_in_memory_that_the_server_has_lost_is_sent_again(monkeypatch) -> None:
    """Such as where a connection broke, and ZeroMQ made it anew by itself."""

    def answer(request: Request) -> None:
        request.answer(Message("x", {}, [array + 1 for array in request.message.arrays]))

    keys = ClusterKeys.make()
    made: list[ClientMemories] = []
    monkeypatch.setattr(
        listener_module, "ClientMemories", lambda: made.append(ClientMemories()) or made[-1]
    )
    with Listener(keys, answer) as listener, Connections(keys, [listener.addresses]) as connections:
        for number in range(8):
            if number == 6:
                assert len(made[0]) == 1
                made[0].__init__()
            message = Message("x", {}, [np.full(100_000, number, np.float32)])
            (got,) = connections.ask(0, message, timeout_s=60.0).arrays
            np.testing.assert_array_equal(got, np.full(100_000, number + 1.0))
    assert len(made[0]) == 0  # it shares no more: all goes by the socket


_CLIENT = """
import sys
import numpy as np
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.wire import Message
with Connections(ClusterKeys(bytes.fromhex(sys.stdin.readline())), [sys.argv[1]]) as connections:
    for _ in range(6):
        connections.ask(0, Message("x", {}, [np.zeros(100_000, np.float32)]), timeout_s=60.0)
    print("shared", flush=True)
    sys.stdin.read()
"""


def _mapped_bytes() -> int:
    """Memory of clients that this process maps."""
    size = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:stratagem" in line:
            begin, end = line.split()[0].split("-")
            size += int(end, 16) - int(begin, 16)
    return size


def test_memory_of_a_killed_client_is_released_though_no_other_one_comes(monkeypatch) -> None:
    monkeypatch.setattr(listener_module, "_MEMORY_TICK_MS", 50)
    keys = ClusterKeys.make()

    def answer(request: Request) -> None:
        request.answer(Message("x"))

    before_bytes = _mapped_bytes()
    with Listener(keys, answer) as listener:
        client = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, listener.addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdout is not None
        client.stdin.write(f"{keys.secret.hex()}\n")
        client.stdin.flush()
        assert client.stdout.readline() == "shared\n"
        assert _mapped_bytes() - before_bytes >= 400_000
        client.kill()
        client.communicate()
        until(lambda: _mapped_bytes() <= before_bytes)


def test_systems_without_such_memory_say_so(monkeypatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="anonymous files with seals exist only on Linux"):
        ClientMemory(1, 1)


def _no_memory(*_) -> int:
    raise OSError("none today")
