"""Bytes that move, of transfers and programs that are known."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.workers.profiled_programs import (
    Program,
    ProgramRuns,
    dumped_programs,
    exchanged_bytes,
    profiled,
)
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
    (program,) = runs.programs
    assert program.name == "jit_known"
    # A device has 64 of the 128 bytes.
    assert exchanged_bytes(runs, {program: compiled.as_text()}) == {
        "jit_known: all-gather": 3 * 128,
        "jit_known: all-reduce": 3 * 128,
        "jit_known: reduce-scatter": 3 * 128,
    }
    assert runs.num_copies == transfers.num_copies == 2


def test_incomplete_profile_is_refused() -> None:
    program = Program("jit_step", 7)
    runs = ProgramRuns()
    runs.operations[program, "dot"] = Counter({0: 2, 1: 2})
    text = "%ar = f32[8]{0} all-reduce(%x), to_apply=%sum"
    with pytest.raises(RuntimeError, match="ar of jit_step was seen"):
        exchanged_bytes(runs, {program: text})
    runs.operations[program, "ar"] = Counter({0: 2, 1: 3})
    with pytest.raises(RuntimeError, match="The profile is incomplete"):
        exchanged_bytes(runs, {program: text})
    runs.operations[program, "ar"] = Counter({0: 2, 1: 2})
    assert exchanged_bytes(runs, {program: text}) == {"jit_step: all-reduce": 2 * 2 * 32}


def test_dumped_program_is_found_by_its_number_or_its_name(tmp_path: Path) -> None:
    exchange = "%ar = f32[8]{0} all-reduce(%x), to_apply=%sum"

    def dump(number: int, name: str, text: str) -> None:
        (tmp_path / f"module_{number:04d}.{name}.cpu_after_optimizations.txt").write_text(text)
        (tmp_path / f"module_{number:04d}.{name}.before_optimizations.txt").write_text("no")

    dump(3, "jit_step", "%c = f32[8]{0} copy(%x)")
    dump(12, "jit_step", exchange)
    third, twelfth, any_one = (Program("jit_step", number) for number in (3, 12, 0))
    texts = dumped_programs(tmp_path, [third, twelfth, any_one])
    assert "copy" in texts[third]
    assert texts[twelfth] == texts[any_one] == exchange
    dump(13, "jit_step", exchange)
    with pytest.raises(RuntimeError, match="2 of 3 programs in"):
        dumped_programs(tmp_path, [any_one])
    with pytest.raises(RuntimeError, match="0 of 0 programs in"):
        dumped_programs(tmp_path, [Program("jit_other", 0)])


def test_arrays_that_live_are_held_where_they_are(devices: list[jax.Device]) -> None:
    gc.collect()  # arrays of earlier tests
    before = held_bytes()
    kept = jax.device_put(ROWS, over(devices[:2], "d"))
    again = kept.addressable_shards[0].data  # the same memory
    others = jax.device_put(ROWS, devices[2])
    after = held_bytes()
    grown = [after[name_of(device)] - before[name_of(device)] for device in devices]
    assert grown == [64, 64, 128]
    del kept, again, others
    assert held_bytes() == before
