"""Published tables, read without servers: against the rows of the servers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stratagem.errors import DataLossError, NotFoundError
from stratagem.parameter_server.embedding.saving import compact, publish, restore, rollback, save
from stratagem.parameter_server.embedding.serving import Tables
from stratagem.parameter_server.server.tables.saved_tables import TableVersions
from tests.unit.launch.waiting import until
from tests.unit.parameter_server.table_clusters import OPTIONS, TableCluster, table_cluster

EVICTING = {"eviction": {"kind": "LeastFrequent"}, "max_rows": 60}
# Keys of the training, one without a row, and one that was never seen.
KEYS = np.append(np.arange(300) * 2**40 - 5, [0, 2**63 - 1, -(2**63)])


def strategy_of(cluster: TableCluster) -> Any:
    """As a strategy has its client."""
    remote = SimpleNamespace(variables=SimpleNamespace(client=cluster.client))
    return SimpleNamespace(placement=SimpleNamespace(remote=remote))


@pytest.fixture
def cluster() -> Iterator[TableCluster]:
    with table_cluster(2, **EVICTING) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path) -> str:
    return str(tmp_path / "published")


@pytest.mark.parametrize("storage_dtype", ["bfloat16", "int8"])
def test_readers_expand_stored_rows(folder, storage_dtype) -> None:
    with table_cluster(2, storage_dtype=storage_dtype) as cluster:
        strategy = strategy_of(cluster)
        for begin in (0, 10):
            cluster.train(range(begin, begin + 10))
            publish(folder, strategy=strategy)
        for _ in range(2):
            with Tables(folder, poll_s=None) as tables:
                found = tables.lookup("t", KEYS)
            np.testing.assert_array_equal(found, cluster.client.pull_rows("t", KEYS))
            assert found.dtype == np.float32
            compact(folder)
        restore(folder, strategy=strategy)
        np.testing.assert_array_equal(found, cluster.client.pull_rows("t", KEYS))


def test_readers_see_what_the_servers_had(cluster, folder) -> None:
    strategy = strategy_of(cluster)
    wanted: dict[int, np.ndarray] = {}
    tables = None
    for begin in range(0, 50, 10):
        cluster.train(range(begin, begin + 10))
        if begin == 30:  # a key with the bits of an unused slot
            cluster.client.push({}, {"t": (np.array([0]), np.ones((1, 2), np.float32))})
        number = publish(folder, strategy=strategy)
        wanted[number] = cluster.client.pull_rows("t", KEYS)
        if tables is None:
            tables = Tables(folder, num_versions=3, poll_s=None)
            assert not tables.refresh()
        else:
            assert tables.refresh()
        assert tables.version == number
        for one in tables.versions:
            np.testing.assert_array_equal(tables.lookup("t", KEYS, version=one), wanted[one])
    assert tables is not None
    assert tables.versions == [3, 4, 5]
    assert tables.names == ["t"]
    assert cluster.counters()["evicted"] > 20
    with Tables(folder, poll_s=None) as another:  # all files at once
        np.testing.assert_array_equal(another.lookup("t", KEYS), wanted[5])
    compact(folder)
    assert not tables.refresh()
    np.testing.assert_array_equal(tables.lookup("t", KEYS), wanted[5])
    cluster.train(range(50, 55))
    publish(folder, strategy=strategy)
    assert tables.refresh()
    np.testing.assert_array_equal(tables.lookup("t", KEYS), cluster.client.pull_rows("t", KEYS))
    tables.close()
    assert tables.versions == []


def test_lookups_return_the_shape_of_the_keys(cluster, folder) -> None:
    cluster.train(range(3))
    publish(folder, strategy=strategy_of(cluster))
    with Tables(folder, poll_s=None) as tables:
        rows = tables.lookup("t", KEYS[:6])
        assert (rows.shape, rows.dtype) == ((6, 2), np.float32)
        np.testing.assert_array_equal(tables.lookup("t", KEYS[:6].reshape(2, 3))[1], rows[3:])
        np.testing.assert_array_equal(tables.lookup("t", KEYS[4]), rows[4])
        pairs = np.ascontiguousarray(KEYS[:6]).view(np.uint32).reshape(6, 2)
        np.testing.assert_array_equal(tables.lookup("t", pairs), rows)
        assert tables.lookup("t", []).shape == (0, 2)
        with pytest.raises(TypeError, match="Keys of dtype float64 were looked up in 't'"):
            tables.lookup("t", [0.5])
        with pytest.raises(TypeError, match="Keys of dtype uint64"):
            tables.lookup("t", np.array([1], np.uint64))
        with pytest.raises(KeyError, match="Table 'x' of version 1"):
            tables.lookup("x", KEYS)
        with pytest.raises(KeyError, match="Table 't' of version 9"):
            tables.lookup("t", KEYS, version=9)


def test_rollback_serves_an_earlier_version_and_restore_trains_it(cluster, folder) -> None:
    strategy = strategy_of(cluster)
    cluster.train(range(5))
    first = publish(folder, strategy=strategy)
    rows, state = cluster.client.pull_rows("t", KEYS), cluster.state()
    cluster.train(range(5, 10))
    second = publish(folder, strategy=strategy)
    with Tables(folder, num_versions=1, poll_s=None) as tables:
        rollback(folder, first)
        assert tables.refresh()
        assert (tables.version, tables.versions) == (first, [first])
        np.testing.assert_array_equal(tables.lookup("t", KEYS), rows)
        assert restore(folder, strategy=strategy) == first
        assert cluster.state() == state
        cluster.train(range(20, 22))
        third = publish(folder, strategy=strategy)
        assert third == second + 1
        assert tables.refresh()
        np.testing.assert_array_equal(tables.lookup("t", KEYS), cluster.client.pull_rows("t", KEYS))
    with pytest.raises(NotFoundError, match="no version 9 of tables"):
        rollback(folder, 9)
    assert restore(folder, second, strategy=strategy) == second


def test_reader_finds_a_new_version_by_itself(cluster, folder, caplog) -> None:
    strategy = strategy_of(cluster)
    publish(folder, strategy=strategy)
    with Tables(folder, poll_s=0.01) as tables:
        cluster.train(range(3))
        number = publish(folder, strategy=strategy)
        until(lambda: tables.version >= number)
        np.testing.assert_array_equal(tables.lookup("t", KEYS), cluster.client.pull_rows("t", KEYS))
        TableVersions(folder).publish(77)
        until(lambda: "Lookups stay at version 2" in caplog.text)
        assert tables.version == number
    assert caplog.text.count("no version 77 of tables") == 1


def test_damaged_file_is_named_and_the_former_version_stays(cluster, folder, tmp_path) -> None:
    strategy = strategy_of(cluster)
    with pytest.raises(NotFoundError, match="No version of tables was published in"):
        Tables(folder)
    cluster.train(range(3))
    publish(folder, strategy=strategy)
    rows = cluster.client.pull_rows("t", KEYS)
    with Tables(folder, poll_s=None) as tables:
        cluster.train(range(3, 6))
        publish(folder, strategy=strategy)
        path = tmp_path / "published" / "00000002" / "t-1.rows"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(DataLossError, match=r"00000002/t-1\.rows cannot be read: the record"):
            tables.refresh()
        with pytest.raises(DataLossError, match=r"00000002/t-1\.rows cannot be read: the record"):
            Tables(folder)
        np.testing.assert_array_equal(tables.lookup("t", KEYS), rows)
        shutil.rmtree(path.parent)
        with pytest.raises(NotFoundError, match="no version 2 of tables"):
            tables.refresh()


def test_table_of_normal_initial_rows_and_bfloat16(folder) -> None:
    options = {"initializer": {"kind": "normal", "a": 0, "b": 1, "seed": 7}}
    with table_cluster(3, dtype="bfloat16", **{**OPTIONS, **options}) as cluster:
        dtype = cluster.shards()[0].value.dtype
        cluster.client.push({}, {"t": (KEYS[:9], np.full((9, 2), 2.5, dtype))})
        publish(folder, strategy=strategy_of(cluster))
        with Tables(folder, poll_s=None) as tables:
            wanted = cluster.client.pull_rows("t", KEYS)
            rows = tables.lookup("t", KEYS)
            assert rows.dtype == wanted.dtype
            np.testing.assert_array_equal(rows, wanted)


def test_bad_arguments(folder) -> None:
    with pytest.raises(ValueError, match="Tables received num_versions=0"):
        Tables(folder, num_versions=0)
    with table_cluster(1, with_table=False) as cluster:
        with pytest.raises(ValueError, match="has no keyed tables"):
            save(folder, strategy=strategy_of(cluster))
        plain: Any = SimpleNamespace(placement=SimpleNamespace(remote=None))
        with pytest.raises(ValueError, match="has no keyed tables"):
            restore(folder, strategy=plain)
