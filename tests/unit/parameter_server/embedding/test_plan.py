"""Places of tables: decisions as a table, their reasons, and strategies that take them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.partitioners import rows_of_shards

IdFrequencies = sg.embedding.IdFrequencies
TableCluster = sg.embedding.TableCluster
TableSize = sg.embedding.TableSize

_SMALL = TableSize("small", 7, 16)
_MIDDLE = TableSize("middle", 1_000_000, 64)  # 0.5 GB with a slot
_LARGE = TableSize("large", 100_000_000, 64)  # 51 GB
_DEVICES = {"num_devices": 4, "device_bytes": 16e9, "link_bytes_per_s": 1e11}
_SERVERS = {"num_servers": 4, "server_bytes": 64e9}
_ZIPF = IdFrequencies(10_000, exponent=1.0)


@pytest.mark.parametrize(
    ("table", "ids", "cluster", "label"),
    [
        # Devices first, where they have the memory.
        (_SMALL, _ZIPF, {**_DEVICES, **_SERVERS}, "replicated on 4 devices"),
        (_MIDDLE, _ZIPF, {**_DEVICES, **_SERVERS}, "replicated on 4 devices"),
        (_LARGE, _ZIPF, {**_DEVICES, **_SERVERS}, "by rows on 4 devices"),
        (_LARGE, _ZIPF, {**_DEVICES, "device_bytes": 8e9, "host_bytes": 64e9}, "on the host"),
        (_LARGE, _ZIPF, {**_DEVICES, "device_bytes": 8e9, **_SERVERS}, "by rows on 4 servers"),
        # A link between devices that is slower than that to the host.
        (_MIDDLE, _ZIPF, {**_SERVERS}, "by rows on 4 servers"),
        # On servers: a split costs each server a part of the message.
        (_MIDDLE, IdFrequencies(100), _SERVERS, "whole on a server"),
        (_MIDDLE, IdFrequencies(100_000), {**_SERVERS, "num_workers": 8}, "by rows on 4 servers"),
        (_LARGE, IdFrequencies(100), {**_SERVERS, "server_bytes": 16e9}, "by rows on 4 servers"),
        (_MIDDLE, _ZIPF, {"num_servers": 1, "server_bytes": 64e9}, "whole on a server"),
    ],
)
def test_decisions(
    table: TableSize, ids: IdFrequencies, cluster: dict[str, Any], label: str
) -> None:
    found = sg.embedding.plan([table], {table.name: ids}, TableCluster(**cluster))
    assert found.choices[0].label == label, found.explain()


@pytest.mark.parametrize(
    ("rate", "max_age_steps", "num_workers", "is_cached"),
    [
        (1e8, 16, 4, True),
        (1e8, 0, 4, False),  # no stale rows allowed
        (1e8, 16, 1, False),  # devices in lockstep have no cache
        (1e11, 16, 2, False),  # one machine: the cache costs more than it saves
    ],
)
def test_workers_cache_rows_where_links_are_slow(
    rate: float, max_age_steps: int, num_workers: int, is_cached: bool
) -> None:
    cluster = TableCluster(**_SERVERS, server_bytes_per_s=rate, num_workers=num_workers)
    found = sg.embedding.plan([_MIDDLE], {"middle": _ZIPF}, cluster, max_age_steps=max_age_steps)
    assert found.choices[0].label.endswith("cached by workers") == is_cached, found.explain()
    cache = found.row_cache
    assert (cache is not None) == is_cached
    if cache is not None:
        assert (cache.max_age_steps, cache.max_rows) == (16, 1_000_000)
        assert not cache.reads_own_updates


def test_scarce_memory_goes_to_the_table_that_gains_most_for_it() -> None:
    busy, idle = TableSize("busy", 1_000_000, 64), TableSize("idle", 1_000_000, 64)
    cluster = TableCluster(**{**_DEVICES, "device_bytes": 0.6e9}, **_SERVERS)
    ids = {"busy": IdFrequencies(100_000), "idle": IdFrequencies(1000)}
    found = sg.embedding.plan([idle, busy], ids, cluster)
    assert [choice.place for choice in found.choices] != ["mirrored", "mirrored"]
    assert found.choices[1].label == "replicated on 4 devices"
    assert found.choices[0].label != "replicated on 4 devices"
    assert "0.48 GiB of each, of which" in found.choices[0].reasons["replicated on 4 devices"]


def test_whole_tables_are_put_on_the_servers_with_room() -> None:
    tables = [TableSize(f"t{index}", 1_000_000, 64) for index in range(5)]
    ids = {table.name: 10 for table in tables}
    cluster = TableCluster(num_servers=2, server_bytes=1.1e9)  # two tables each
    with pytest.raises(ValueError, match="fits nowhere"):
        sg.embedding.plan(tables, ids, cluster)
    found = sg.embedding.plan(tables[:4], ids, cluster)
    assert {choice.label for choice in found.choices} == {"whole on a server"}


def test_neighbors_that_are_popular_make_a_split_worth_less() -> None:
    counts = np.zeros(1_000_000)
    counts[:2000] = 1.0
    cluster = TableCluster(**_SERVERS, num_workers=8)
    found = sg.embedding.plan([_MIDDLE], {"middle": IdFrequencies(9000, counts=counts)}, cluster)
    assert found.choices[0].label == "whole on a server"
    spread = sg.embedding.plan([_MIDDLE], {"middle": IdFrequencies(9000)}, cluster)
    assert spread.choices[0].label == "by rows on 4 servers"


def test_explanation_has_each_other_way() -> None:
    cluster = TableCluster(**{**_DEVICES, "device_bytes": 8e9}, **_SERVERS)
    text = sg.embedding.plan([_LARGE, _SMALL], {"large": _ZIPF, "small": 10}, cluster).explain()
    large, small = text.split("\nsmall: ")
    assert large.startswith("large: by rows on 4 servers. 100,000,000 rows of 256 bytes")
    assert "not replicated on 4 devices: it needs" in large
    assert "not by rows on 4 devices: it needs" in large
    assert "not by columns: not supported" in large
    assert small.startswith("replicated on 4 devices")


def test_a_partitioner_splits_planned_shapes_only() -> None:
    cluster = TableCluster(**_SERVERS, num_workers=8)
    ids = {"middle": IdFrequencies(100_000), "small": 10}
    split = sg.embedding.plan([_MIDDLE, _SMALL], ids, cluster).partitioner
    assert rows_of_shards(split, (1_000_000, 64), "float32", name="middle") == [250_000] * 4
    assert rows_of_shards(split, (7, 16), "float32", name="small") == [7]
    assert rows_of_shards(split, (1_000_000,), "float32", name="bias") == [1_000_000]


def test_a_hybrid_strategy_takes_the_placement() -> None:
    table = TableSize("users", 4096, 16)
    cluster = TableCluster(num_devices=2, device_bytes=0.3e6)  # half of the table and its slot
    found = sg.embedding.plan([table], {"users": 8}, cluster)
    assert found.placement == {"(^|/)users(/|$)": "sharded"}
    strategy = sg.HybridStrategy(["cpu:0", "cpu:1"], placement=found.placement)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Embedding(4096, 16, name="users"),
                keras.layers.Dense(1, name="more_users"),
            ]
        )
        model.build((None, 1))
    table_shards = model.layers[0].embeddings.stored.addressable_shards
    assert [shard.data.shape for shard in table_shards] == [(2048, 16)] * 2


@pytest.mark.parametrize(
    ("tables", "ids"), [([], {}), ([_SMALL, _SMALL], {"small": 1}), ([_SMALL], {"middle": 1})]
)
def test_tables_without_names_or_frequencies_are_refused(
    tables: list[TableSize], ids: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="frequencies for each"):
        sg.embedding.plan(tables, ids, TableCluster())
