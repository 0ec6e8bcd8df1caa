"""`sg.embedding.reshard` under strategies, in callbacks, beside workers, and its errors."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.client.shard_layout import layout_of_keys
from stratagem.parameter_server.partitioners import rows_of_shards
from stratagem.parameter_server.server.updates import UpdateMode
from tests.unit.parameter_server.clusters import local_strategy
from tests.unit.parameter_server.embedding.keyed_models import (
    FIT,
    IDS,
    KEYS,
    PLACES,
    Y,
    keyed_model,
    plain_model,
    rows_of,
)


class Reshard(keras.callbacks.Callback):
    """Moves the tables to another number of servers after each batch."""

    def __init__(self, strategy: Any, numbers: list[int]) -> None:
        super().__init__()
        self._strategy, self._numbers = strategy, numbers

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._numbers:
            sg.embedding.reshard(self._numbers.pop(0), strategy=self._strategy)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [UpdateMode(), UpdateMode(num_needed=1)])
def test_fit_with_moves_between_batches_is_plain_fit(mode) -> None:
    with local_strategy(num_servers=3, mode=mode) as strategy:
        keyed = keyed_model(strategy, lambda: keras.optimizers.Adam(0.05))
        plain = plain_model(keyed, keras.optimizers.Adam(0.05))
        numbers = [1, 3, 2, 3]
        callback = Reshard(strategy, numbers)
        keyed.fit(sg.embedding.keys(IDS), Y, **FIT, callbacks=[callback])
        assert not numbers
        plain.fit(PLACES, Y, **FIT)
        np.testing.assert_allclose(rows_of(keyed), rows_of(plain), rtol=1e-4, atol=1e-5)
        assert [one.rows for one in sg.embedding.stats(strategy).values()] == [len(KEYS)]
        assert int(keyed.optimizer.iterations) == 6


@pytest.mark.slow
def test_two_workers_that_push_while_tables_move() -> None:
    """Each function adds 1 to the rows of its keys: SGD with a gradient of -1."""
    num_functions = 120
    with local_strategy(num_workers=2, num_servers=3) as strategy:
        coordinator = sg.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            layer = sg.embedding.DynamicEmbedding(1, initializer="zeros", name="table")
            layer.build()
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([layer.embeddings])

        def push(keys: np.ndarray) -> None:
            def step(pairs: Any) -> Any:
                loss, grads = sg.value_and_grad(lambda: -layer(pairs).sum(), [layer.embeddings])
                optimizer.apply_gradients(zip(grads, [layer.embeddings], strict=True))
                return loss

            sg.get_strategy().run(step, args=(keys,))

        wanted = np.zeros(40, int)
        moves: list[sg.embedding.ReshardStats] = []
        random = np.random.default_rng(0)

        def move() -> None:
            for num_servers in (1, 3, 2, 3):
                moves.append(sg.embedding.reshard(num_servers, strategy=strategy))

        thread = threading.Thread(target=move)
        for number in range(num_functions):
            chosen = random.choice(40, 10, replace=False)
            wanted[chosen] += 1
            coordinator.schedule(push, args=(sg.embedding.keys(chosen * 2**40 + 1),))
            if number == 10:
                thread.start()
        thread.join()
        coordinator.join()
        assert len(moves) == 4
        rows = np.asarray(layer(sg.embedding.keys(np.arange(40) * 2**40 + 1)))
        np.testing.assert_array_equal(rows[:, 0], wanted)
        (stats,) = sg.embedding.stats(strategy).values()
        assert stats.rows == np.count_nonzero(wanted)


@pytest.mark.slow
def test_moves_beside_steps_of_one_process() -> None:
    with sg.HybridStrategy(placement={"table": "server"}, num_servers=2) as strategy:
        keyed = keyed_model(strategy, lambda: keras.optimizers.Adagrad(0.5))
        plain = plain_model(keyed, keras.optimizers.Adagrad(0.5))
        is_over = threading.Event()
        moves: list[Any] = []

        def move() -> None:
            while not is_over.is_set() or len(moves) < 2:
                moves.append(sg.embedding.reshard(1 + len(moves) % 2, strategy=strategy))

        thread = threading.Thread(target=move)
        thread.start()
        keyed.fit(sg.embedding.keys(IDS), Y, **FIT)
        is_over.set()
        thread.join()
        plain.fit(PLACES, Y, **FIT)
        np.testing.assert_allclose(rows_of(keyed), rows_of(plain), rtol=1e-4, atol=1e-5)


def test_bad_input() -> None:
    with local_strategy(num_servers=2) as strategy:
        with pytest.raises(ValueError, match="has no keyed tables"):
            sg.embedding.reshard(1, strategy=strategy)
        with strategy.scope():
            sg.embedding.DynamicEmbedding(1, max_rows=2, name="users").build()
        with pytest.raises(TypeError, match=r"received num_servers=1\.5"):
            sg.embedding.reshard(1.5, strategy=strategy)
        for number in (0, 3):
            with pytest.raises(ValueError, match="1 to 2, the servers of this cluster"):
                sg.embedding.reshard(number, strategy=strategy)
        for tables in ("users", ["items"]):
            with pytest.raises(ValueError, match="received tables="):
                sg.embedding.reshard(1, tables, strategy=strategy)
        assert sg.embedding.reshard(2, strategy=strategy) == sg.embedding.ReshardStats()
        strategy.placement.remote.variables.is_coordinator = False
        with pytest.raises(ValueError, match="one of several programs that update"):
            sg.embedding.reshard(1, strategy=strategy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 1}, "divides max_rows=1 over 2 servers"),
        (
            {"tiers": {"memory_bytes": 10**6, "folder": "/f"}},
            "has rows on disk and was to be moved",
        ),
    ],
)
def test_tables_that_cannot_be_moved(options, message) -> None:
    with local_strategy(num_servers=2) as strategy:
        client = strategy.placement.remote.variables.client
        client.know(layout_of_keys("users", (2,), "float32", [0], options))
        with pytest.raises(ValueError, match=message):
            sg.embedding.reshard(2, strategy=strategy)


# Places of tables: decisions as a table, their reasons, and strategies that take them.

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
