"""GB/s per core of batches between processes: `python -m benchmarks.transport.batches`.

A core second is one of either process: the sender that has packed a batch, and the receiver that
unpacks it. So the figures change less with other load than times do.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import threading
import time
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.shared_memory import MemoryLimits
from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import is_available, pack_batch, unpack_batch

__all__ = ["Way", "measure"]

_SHARED, _SOCKET = MemoryLimits(2**28, 8), MemoryLimits(0, 0)


class _Open(ClusterKeys):
    """Keys that are not used, to see the cost of encryption."""

    def lock(self, socket: Any) -> None:
        pass

    def unlock(self, socket: Any) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Way:
    """A way between two processes, and the batches that take it."""

    name: str
    has_local_socket: bool = False
    is_encrypted: bool = True
    is_compressed: bool = False
    content: str = "noise"
    limits: MemoryLimits = _SOCKET


_WAYS = (
    Way("shared memory", has_local_socket=True, limits=_SHARED),
    Way("Unix socket", has_local_socket=True),
    Way("TCP", is_encrypted=False),
    Way("TCP, CURVE"),
    Way("TCP, CURVE, zstd, noise", is_compressed=True),
    Way("TCP, CURVE, zstd, text ids", is_compressed=True, content="ids"),
)


def _batch(content: str, num_bytes: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    if content == "noise":  # as images
        return rng.integers(0, 256, num_bytes, np.uint8)
    # Token ids of a text, as int32: Zipf's law, of a vocabulary of 32,000.
    return np.minimum(rng.zipf(1.1, num_bytes // 4), 32_000).astype(np.int32)


def _serve(way: Way, keys: ClusterKeys, telling: Any) -> None:
    batches: dict[int, np.ndarray[Any, Any]] = {}

    def handle(request: Request) -> None:
        size = request.message.fields["size"]
        if size == 0:
            request.answer(Message("cpu", {"seconds": time.process_time()}))
            return
        if size not in batches:
            batches[size] = _batch(way.content, size)
        request.answer(pack_batch(batches[size], is_compressed=way.is_compressed))

    listener = Listener(keys, handle)
    telling.send(listener.addresses if way.has_local_socket else listener.address)
    threading.Event().wait()


def measure(way: Way, num_bytes: int, seconds: float) -> tuple[float, float]:
    """Returns GB for each core second, and the best time of a batch in ms."""
    keys = (ClusterKeys if way.is_encrypted else _Open).make()
    context = multiprocessing.get_context("spawn")
    told, telling = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(way, keys, telling), daemon=True)
    process.start()
    with Connections(keys, [told.recv()], memory_limits=way.limits) as connections:

        def cpu_s() -> float:
            other = connections.ask(0, Message("pull", {"size": 0})).fields["seconds"]
            return other + time.process_time()

        def pull() -> Any:
            return unpack_batch(connections.ask(0, Message("pull", {"size": num_bytes})))

        for _ in range(5):  # opens the fastest connection
            held = pull()
        begin_s, begin_cpu_s, count, best_s = time.perf_counter(), cpu_s(), 0, float("inf")
        while count < 5 or time.perf_counter() < begin_s + seconds:
            asked_s = time.perf_counter()
            held = pull()
            best_s = min(best_s, time.perf_counter() - asked_s)
            count += 1
        used_s = cpu_s() - begin_cpu_s
    if not np.array_equal(held, _batch(way.content, num_bytes)):
        raise RuntimeError(f"{way.name} changed a batch")
    process.kill()
    process.join()
    return count * num_bytes / used_s / 1e9, best_s * 1e3


@click.command()
@click.option("--seconds", default=3.0, show_default=True, help="Of each measurement.")
@click.option("--megabytes", multiple=True, type=float, default=(0.6, 38.5), show_default=True)
def main(seconds: float, megabytes: tuple[float, ...]) -> None:
    """Prints GB/s per core, and GB/s of the best batch, for each way and size."""
    table = Table("way", *(f"{size} MB: per core, best" for size in megabytes))
    for way in _WAYS:
        if way.is_compressed and not is_available():
            continue
        cells: list[str] = []
        for size in megabytes:
            num_bytes = int(size * 1e6) // 4 * 4
            per_core, best_ms = measure(way, num_bytes, seconds)
            cells.append(f"{per_core:.2f}, {num_bytes / best_ms / 1e6:.2f}")
        table.add_row(way.name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
