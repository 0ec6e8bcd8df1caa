"""Bytes that reach a device which did not have them, counted where programs send them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Generator
from typing import Any
from unittest import mock

import jax
from jax.core import Tracer

__all__ = ["Transfers", "counted_transfers", "name_of"]

_Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass
class Transfers:
    """What `jax.device_put` sent.

    Args:
        between: bytes that came from other devices, by the name of the device that got them.
        from_host: bytes that came from NumPy arrays and numbers, likewise.
        num_copies: arrays, or parts of one, that came from one other device; JAX puts those that
            come from several together on the host.
    """

    between: Counter[str] = dataclasses.field(default_factory=Counter)
    from_host: Counter[str] = dataclasses.field(default_factory=Counter)
    num_copies: int = 0

    def note(self, before: Any, after: jax.Array) -> None:
        """Counts one array.

        Args:
            before: what was sent.
            after: what came of it.
        """
        there: dict[str, _Box] = {}
        if is_array := isinstance(before, jax.Array):
            shards = before.addressable_shards
            there = {name_of(shard.device): _box(shard.index, before.shape) for shard in shards}
        for shard in after.addressable_shards:
            box, device = _box(shard.index, after.shape), name_of(shard.device)
            size = math.prod(end - start for start, end in box)
            missing = size - (_overlap(box, there[device]) if device in there else 0)
            num_bytes = missing * after.dtype.itemsize
            if not is_array:
                self.from_host[device] += num_bytes
            elif missing:
                self.between[device] += num_bytes
                self.num_copies += any(_overlap(box, whole) == size for whole in there.values())


@contextlib.contextmanager
def counted_transfers() -> Generator[Transfers]:
    """Counts what is sent by `jax.device_put` until it is left, by any thread."""
    transfers = Transfers()
    lock = threading.Lock()
    put = jax.device_put

    def counting(value: Any, *arguments: Any, **named: Any) -> Any:
        result = put(value, *arguments, **named)
        pairs = zip(jax.tree.leaves(value), jax.tree.leaves(result), strict=True)
        with lock:
            for before, after in pairs:
                if not isinstance(after, Tracer):
                    transfers.note(before, after)
        return result

    with mock.patch.object(jax, "device_put", counting):
        yield transfers


def name_of(device: jax.Device) -> str:
    """Returns what strategies call a device: ids of GPUs and CPUs alone are the same numbers."""
    return f"{device.platform}:{device.id}"


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Box:
    ranges = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, end) for start, end, _ in ranges)


def _overlap(one: _Box, other: _Box) -> int:
    """Number of elements in both."""
    sides = ((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return math.prod(max(0, end - start) for start, end in sides)
