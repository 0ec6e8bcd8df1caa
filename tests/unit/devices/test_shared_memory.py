"""Sums in shared memory, between threads and between processes, against NumPy."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import queue
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stratagem.devices.shared_sums import (
    _BLOCK_BYTES,
    SharedArea,
    SumServer,
    is_supported,
)

pytestmark = pytest.mark.skipif(not is_supported(), reason="memory is shared on Linux on x86-64")


class Sum:
    """A call for a sum, whose end can be waited for."""

    def __init__(self, addend: Any, *, in_place: bool = True) -> None:
        self.total = addend if in_place else np.zeros_like(addend)
        self.arguments, self.results = [addend], [self.total]
        self._ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def complete(self) -> None:
        self._ended.put(None)

    def fail(self, message: str) -> None:
        self._ended.put(message)

    def error(self, limit_s: float = 60.0) -> str | None:
        return self._ended.get(timeout=limit_s)


@contextlib.contextmanager
def servers_of(count: int, is_lost: Any = lambda: False) -> Iterator[list[SumServer]]:
    """One server a replica, each with its own mapping of the memory."""
    area = SharedArea(count)
    areas = [area, *(SharedArea(count, area.offer) for _ in range(count - 1))]
    servers = [SumServer(one, rank, is_lost) for rank, one in enumerate(areas)]
    yield servers
    for server in servers:
        server.close()


def add(servers: list[SumServer], parts: list[Any], *, in_place: bool = True) -> list[Any]:
    sums = [Sum(part.copy(), in_place=in_place) for part in parts]
    for server, one in zip(servers, sums, strict=True):
        server.start(one)
    assert [one.error() for one in sums] == [None] * len(sums)
    return [one.total for one in sums]


@pytest.mark.parametrize(
    ("count", "in_place"),
    [
        (2, True),
        (3, False),
        pytest.param(5, True, marks=pytest.mark.slow),
    ],
)
def test_all_replicas_have_the_sum_in_replica_order(count: int, in_place: bool) -> None:
    chance = np.random.default_rng(count)
    per_block = _BLOCK_BYTES // 4
    with servers_of(count) as servers:
        for size in (1, count - 1, count + 1, 1000, per_block, per_block + 1, 3 * per_block + 7):
            parts = [chance.normal(size=size).astype("float32") for _ in range(count)]
            expected = parts[0]
            for part in parts[1:]:
                expected = expected + part
            for total in add(servers, parts, in_place=in_place):
                np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize(
    "dtype", ["int8", "uint16", "int32", "int64", "float64", "complex64", "complex128"]
)
def test_sums_of_other_dtypes(dtype: str) -> None:
    parts = [(np.arange(5000) % (100 + place)).astype(dtype) for place in range(2)]
    with servers_of(2) as servers:
        for total in add(servers, parts):
            assert total.dtype == dtype
            np.testing.assert_array_equal(total, parts[0] + parts[1])


@pytest.mark.parametrize(("sizes", "dtypes"), [((4, 5), "ff"), ((4, 4), "fi")])
def test_different_arrays_are_not_added_and_nothing_is_after_them(sizes, dtypes) -> None:
    with servers_of(2) as servers:
        sums = [Sum(np.ones(size, dtype)) for size, dtype in zip(sizes, dtypes, strict=True)]
        for server, one in zip(servers, sums, strict=True):
            server.start(one)
        assert any("different arrays" in str(one.error()) for one in sums)
        later = Sum(np.ones(4))
        servers[0].start(later)
        assert later.error()  # replicas may be in different rounds, and would add other arrays


def test_a_sum_ends_with_an_error_once_another_process_is_lost() -> None:
    lost: list[bool] = []
    with servers_of(2, lambda: bool(lost)) as servers:
        one = Sum(np.ones(4))
        servers[0].start(one)
        with pytest.raises(queue.Empty):  # it waits for the other replica
            one.error(0.3)
        lost.append(True)
        assert "lost" in str(one.error())


def test_threads_take_short_turns_while_a_sum_is_under_way() -> None:
    usual_s = sys.getswitchinterval()
    with servers_of(2) as servers:
        sums = [Sum(np.ones(4)) for _ in servers]
        servers[0].start(sums[0])
        assert sys.getswitchinterval() < 0.1 * usual_s
        servers[1].start(sums[1])
        assert [one.error() for one in sums] == [None, None]
    assert sys.getswitchinterval() == usual_s


def test_an_offer_that_does_not_fit_is_refused() -> None:
    area = SharedArea(2)
    with pytest.raises(ValueError, match="identifier"):
        SharedArea(2, {**area.offer, "word": "0" * 32})
    with pytest.raises(OSError, match="No such file"):
        SharedArea(2, {**area.offer, "file": 10**6})
    unsealed = os.memfd_create("stratagem unsealed")
    os.ftruncate(unsealed, 2**24)
    with pytest.raises(ValueError, match="sealed"):
        SharedArea(2, {**area.offer, "file": unsealed})
    os.close(unsealed)
    with open(__file__) as other, pytest.raises(ValueError, match="not the memory"):
        SharedArea(2, {**area.offer, "file": other.fileno()})
    with pytest.raises(ValueError, match="1000 replicas"):
        SharedArea(1000)


def test_memory_is_private_whole_and_given_back(monkeypatch) -> None:
    def files() -> int:
        gc.collect()
        entries = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum("memfd" in os.readlink(one) for one in entries if os.path.islink(one))

    before = files()
    area = SharedArea(2)
    status = os.fstat(area.offer["file"])
    assert stat.S_IMODE(status.st_mode) == 0o600
    # All of it is there from the beginning: the lack of a page would end a process by SIGBUS.
    assert status.st_blocks * 512 >= status.st_size > 2**22
    assert files() > before
    del area
    assert files() == before

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        SharedArea(2)
    assert files() == before


_CHILD = """
import json, queue, sys
import numpy as np
from stratagem.devices.shared_sums import SharedArea, SumServer
from tests.unit.devices.test_shared_memory import Sum
rank, offer = int(sys.argv[1]), json.loads(sys.argv[2])
server = SumServer(SharedArea(3, offer), rank, lambda: False)
for number in range(20):
    one = Sum(np.full(300_000, rank * 10.0 + number))
    server.start(one)
    assert one.error() is None
    assert (one.total == 30.0 + 3 * number).all()
print("added", flush=True)
sys.stdin.read()
"""


def test_sums_between_processes_of_which_none_leaves_anything_behind() -> None:
    area = SharedArea(3)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(rank), json.dumps(area.offer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 2)
    ]
    try:
        server = SumServer(area, 0, lambda: False)
        for number in range(20):
            one = Sum(np.full(300_000, float(number)))
            server.start(one)
            assert one.error() is None
            assert (one.total == 30.0 + 3 * number).all()
        server.close()
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "added\n"
    finally:
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.communicate()
    # No name outlives the processes, since there never was one.
    target = os.readlink(f"/proc/self/fd/{area.offer['file']}")
    assert target.startswith("/memfd:")
    assert target.endswith("(deleted)")
