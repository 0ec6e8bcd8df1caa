"""Bytes that move, of transfers and programs that are known."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.workers.profiled_programs import ProgramRuns, exchanged_bytes, profiled
from benchmarks.workers.stratagem_placement import held_bytes
from benchmarks.workers.transfers import counted_transfers, name_of

ROWS = np.arange(32, dtype="float32").reshape(8, 4)  # 128 bytes


@pytest.fixture
def devices() -> list[jax.Device]:
    return jax.devices("cpu")[:3]


def over(devices: list[jax.Device], *axes: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("d",)), PartitionSpec(*axes))


def test_bytes_reach_devices_that_did_not_have_them(devices: list[jax.Device]) -> None:
    first, second, third = (name_of(device) for device in devices)
    parts, copies = over(devices[:2], "d"), over(devices[:2])
    with counted_transfers() as transfers:
        one = jax.device_put(ROWS, devices[2])
        assert (transfers.from_host, transfers.between) == ({third: 128}, {})
        jax.device_put(one, devices[2])
        assert transfers.num_copies == 0
        both = jax.device_put({"a": one}, copies)["a"]
        assert transfers.between == {first: 128, second: 128}
        jax.device_put(both, parts)  # each has its part
        assert transfers.num_copies == 2
        halves = jax.device_put(one, parts)
        assert transfers.between == {first: 192, second: 192}
        jax.device_put(halves, copies)
        assert transfers.between == {first: 256, second: 256}
        assert transfers.num_copies == 4
        jax.device_put(halves, devices[2])  # put together on the host
        assert transfers.between == {first: 256, second: 256, third: 128}
        assert transfers.num_copies == 4
        thread = threading.Thread(target=lambda: jax.device_put(one, devices[0]))
        thread.start()
        thread.join()
        assert transfers.between[first] == 384
    jax.device_put(one, devices[0])
    assert transfers.between[first] == 384


def test_programs_tell_what_they_exchanged(devices: list[jax.Device]) -> None:
    spec = PartitionSpec("d")

    def known(part: Any) -> Any:
        whole = jax.lax.all_gather(part, "d")
        return jax.lax.psum(part, "d") + jax.lax.psum_scatter(whole, "d") * whole.sum()

    mesh = Mesh(np.array(devices[:2]), ("d",))
    function = jax.jit(jax.shard_map(known, mesh=mesh, in_specs=spec, out_specs=spec))
    rows = jax.device_put(ROWS, over(devices[:2], "d"))
    compiled = function.lower(rows).compile()
    elsewhere = jax.device_put(ROWS, devices[2])
    jax.block_until_ready((compiled(rows), elsewhere))
    with counted_transfers() as transfers, profiled() as runs:
        for _ in range(3):
            jax.block_until_ready(compiled(rows))
        jax.block_until_ready(jax.device_put(elsewhere, over(devices[:2])))
    ((program, name),) = runs.names.items()
    assert name == "jit_known"
    # A device has 64 of the 128 bytes.
    assert exchanged_bytes(runs, {program: compiled.as_text()}) == {
        "jit_known: all-gather": 3 * 128,
        "jit_known: all-reduce": 3 * 128,
        "jit_known: reduce-scatter": 3 * 128,
    }
    assert runs.num_copies == transfers.num_copies == 2


def test_incomplete_profile_is_refused() -> None:
    runs = ProgramRuns(names={7: "jit_step"})
    text = "%ar = f32[8]{0} all-reduce(%x), to_apply=%sum"
    with pytest.raises(RuntimeError, match="ar of jit_step was seen"):
        exchanged_bytes(runs, {7: text})
    runs.operations[7, "ar"] = Counter({0: 2, 1: 3})
    with pytest.raises(RuntimeError, match="The profile is incomplete"):
        exchanged_bytes(runs, {7: text})
    runs.operations[7, "ar"] = Counter({0: 2, 1: 2})
    assert exchanged_bytes(runs, {7: text}) == {"jit_step: all-reduce": 2 * 2 * 32}


def test_arrays_that_live_are_held_where_they_are(devices: list[jax.Device]) -> None:
    before = held_bytes()
    kept = jax.device_put(ROWS, over(devices[:2], "d"))
    again = kept.addressable_shards[0].data  # the same memory
    others = jax.device_put(ROWS, devices[2])
    after = held_bytes()
    grown = [after[name_of(device)] - before[name_of(device)] for device in devices]
    assert grown == [64, 64, 128]
    del kept, again, others
    assert held_bytes() == before
