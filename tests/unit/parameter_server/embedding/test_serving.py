"""Published tables, read without servers: against the rows of the servers."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.test_util import check_grads

import stratagem as sg
from stratagem.errors import DataLossError, NotFoundError
from stratagem.parameter_server.embedding import export
from stratagem.parameter_server.embedding.layer import COMBINERS, pooled, row_initializer
from stratagem.parameter_server.embedding.saving import compact, publish, restore, rollback, save
from stratagem.parameter_server.embedding.serving import Tables
from stratagem.parameter_server.server.tables.saved_tables import TableVersions
from stratagem.parameter_server.server.tables.table_options import RowInitializer
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


# Functions of `sg.embedding`: exports, pooled rows, keys, initializers and saved versions.


# Exported tables, read by pyarrow alone.


def rows_of(cluster: TableCluster) -> dict[int, tuple[float, ...]]:
    return {key: values[:2] for key, values in cluster.state().items()}


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_file_has_all_rows(tmp_path, format) -> None:
    arrow = pytest.importorskip("pyarrow")
    with table_cluster(2, allow_row_export=True) as cluster:
        cluster.create("a/b", dtype="bfloat16", allow_row_export=True)
        cluster.create("c", storage_dtype="int8", allow_row_export=True)
        for name in ("t", "c"):
            cluster.train(range(10), name)
        strategy = strategy_of(cluster)
        paths = export(tmp_path / "with", format=format, with_keys=True, strategy=strategy)
        without = export(tmp_path / "without", format=format, strategy=strategy)
        wanted = rows_of(cluster)
        keys = np.array([*cluster.state("c")])
        rounded = cluster.client.pull_rows("c", keys)
        with pytest.raises(FileExistsError, match="with already exists"):
            export(tmp_path / "with", strategy=strategy)
    assert [os.path.basename(path) for path in paths] == [
        f"{name}.{format}" for name in ("t", "a%2Fb", "c")
    ]
    assert sorted(os.listdir(tmp_path)) == ["with", "without"]

    def read(path: str):
        if format == "parquet":
            return pytest.importorskip("pyarrow.parquet").read_table(path)
        return arrow.ipc.open_file(path).read_all()

    table = read(paths[0])
    assert table.schema.field("row").type == arrow.list_(arrow.float32(), 2)
    found = dict(zip(table["key"].to_pylist(), map(tuple, table["row"].to_pylist()), strict=True))
    assert found == wanted
    table = read(without[0])
    assert table.column_names == ["row"]
    assert sorted(map(tuple, table["row"].to_pylist())) == sorted(wanted.values())
    table = read(paths[2])
    assert table.schema.field("row").type == arrow.list_(arrow.float32(), 2)
    found = dict(zip(table["key"].to_pylist(), table["row"].to_pylist(), strict=True))
    assert found == dict(zip(keys.tolist(), rounded.tolist(), strict=True))
    empty = read(paths[1])
    assert (empty.num_rows, empty.column_names) == (0, ["key", "row"])


def test_keys_need_the_flag(tmp_path, monkeypatch) -> None:
    pytest.importorskip("pyarrow")
    with table_cluster(1) as cluster:
        strategy = strategy_of(cluster)
        with pytest.raises(PermissionError, match=r"The keys of the tables \['t'\]"):
            export(tmp_path / "rows", with_keys=True, strategy=strategy)

        def fail(*arguments: object, **options: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(cluster.client, "ask_about_tables", fail)
        with pytest.raises(OSError, match="disk full"):
            export(tmp_path / "rows", strategy=strategy)
    assert not os.listdir(tmp_path)


def test_another_format_and_no_library(tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="export received format='csv'"):
        export(tmp_path / "rows", format="csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with (
        table_cluster(1) as cluster,
        pytest.raises(ImportError, match=r"export needs pyarrow(.|\n)*pip install 'stratagem\[da"),
    ):
        export(tmp_path / "rows", strategy=strategy_of(cluster))
    assert not os.listdir(tmp_path)


# Pooled rows, beside sums of Python and gradients of differences.

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(5, 4, 3))
WEIGHTS = RNG.uniform(0.5, 2, size=(5, 4))
# From all rows to none.
MASK = np.arange(4) < np.array([4, 3, 2, 1, 0])[:, None]


def by_hand(rows: np.ndarray, mask: np.ndarray, weights: np.ndarray, combiner: str) -> np.ndarray:
    result = np.zeros((len(rows), rows.shape[-1]))
    for number in range(len(rows)):
        own = [(weights[number, k], rows[number, k]) for k in range(4) if mask[number, k]]
        total = sum((weight * row for weight, row in own), np.zeros(rows.shape[-1]))
        divisor = {
            "sum": 1.0,
            "mean": sum(weight for weight, _ in own),
            "sqrtn": sum(weight**2 for weight, _ in own) ** 0.5,
        }[combiner]
        result[number] = total / divisor if own else total
    return result


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_every_combiner(combiner, is_masked, is_weighted) -> None:
    mask = MASK if is_masked else np.ones_like(MASK)
    weights = WEIGHTS if is_weighted else np.ones_like(WEIGHTS)
    found = pooled(
        jnp.asarray(ROWS),
        jnp.asarray(MASK) if is_masked else None,
        WEIGHTS if is_weighted else None,
        combiner,
    )
    np.testing.assert_allclose(found, by_hand(ROWS, mask, weights, combiner), 1e-5, 1e-6)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_gradients_are_those_of_small_differences(combiner) -> None:
    def total(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(pooled(rows, jnp.asarray(MASK), weights, combiner)))

    arrays = jnp.asarray(ROWS), jnp.asarray(WEIGHTS)
    check_grads(total, arrays, order=1, modes=["rev"], rtol=1e-2)


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Weights of shape \(5,\) were given for keys of shape"):
        pooled(jnp.asarray(ROWS), None, np.ones(5), "sum")


# Keys: the same bits as the ids, and TensorFlow's fingerprints of strings.

# Of FarmHash 1.1 (pyfarmhash 0.5.1, fingerprint64).
FINGERPRINTS = {"a": 12917804110809363939, "blue": 10660015788068286345}
EXTREMES = [-(2**63), -1, 0, 1, 2**31, 2**32, 2**63 - 1]


def numbers(keys: np.ndarray) -> list[Any]:
    """The keys as Python computes them from their halves."""
    assert (keys.dtype, keys.shape[-1]) == (np.uint32, 2)
    halves = keys.reshape(-1, 2).tolist()
    return [low + (high << 32) for low, high in halves]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (np.array([EXTREMES]), [value % 2**64 for value in EXTREMES]),
        (np.array([-1], "int8"), [2**64 - 1]),
        *(
            (np.array([0, 5, largest], dtype), [0, 5, largest])
            for dtype in ("int8", "int32", "uint16", "uint64", ">i8")
            for largest in [int(np.iinfo(np.dtype(dtype).newbyteorder("=")).max)]
        ),
        (7, [7]),
        ([], []),
        (np.empty((3, 0), "S4"), []),
        (np.arange(12).reshape(3, 4)[::2, 1:3], [1, 2, 9, 10]),
        (np.array([["a", "blue", ""]], "U"), [FINGERPRINTS["a"], FINGERPRINTS["blue"], 0]),
        (np.array([["a", "blue", ""]], "S"), [FINGERPRINTS["a"], FINGERPRINTS["blue"], 0]),
        (np.array([["a", "blue", ""]], "O"), [FINGERPRINTS["a"], FINGERPRINTS["blue"], 0]),
    ],
)
def test_keys_are_the_integers_or_the_fingerprints_of_tensorflow(values, wanted) -> None:
    keys = sg.embedding.keys(values)
    assert numbers(keys) == wanted
    assert keys.shape == (*np.shape(values), 2)


@pytest.mark.parametrize(
    ("values", "received"),
    [([1.5], "dtype float64"), ([True], "dtype bool"), ([["a"], [None]], "type NoneType")],
)
def test_other_values_are_refused_without_their_value(values, received) -> None:
    with pytest.raises(TypeError, match=rf"sg.embedding.keys received .*{received}") as raised:
        sg.embedding.keys(np.array(values))
    assert "1.5" not in str(raised.value)


# Keras initializers as distributions that servers have.

INITIALIZERS = keras.initializers


@pytest.mark.parametrize(
    ("initializer", "expected"),
    [
        (INITIALIZERS.RandomUniform(-1, 2, seed=3), RowInitializer("uniform", -1, 2, 3)),
        (INITIALIZERS.RandomNormal(1, 2, seed=4), RowInitializer("normal", 1, 2, 4)),
        (INITIALIZERS.TruncatedNormal(0, 2, 5), RowInitializer("truncated_normal", 0, 2, 5)),
        (INITIALIZERS.RandomNormal(), RowInitializer("normal", 0.0, 0.05, 9)),  # no seed
        (INITIALIZERS.Constant(1.5), RowInitializer("constant", 1.5)),
        (INITIALIZERS.Zeros(), RowInitializer("constant", 0.0)),
        (INITIALIZERS.Ones(), RowInitializer("constant", 1.0)),
        (
            INITIALIZERS.RandomUniform(seed=keras.random.SeedGenerator(7)),
            RowInitializer("uniform", -0.05, 0.05, 7),
        ),
    ],
)
def test_initializer_is_sent_as_data(initializer, expected) -> None:
    assert row_initializer(initializer, 9) == expected


# Saved versions by the library's functions.


def test_newest_version_is_restored_unless_one_is_chosen(tmp_path) -> None:
    with table_cluster(1) as cluster:
        strategy = strategy_of(cluster)
        with pytest.raises(NotFoundError, match="has no versions of tables"):
            restore(tmp_path, strategy=strategy)
        states = []
        number = None
        for step in range(3):
            cluster.train(range(step, step + 1))
            number = save(tmp_path, since=number, strategy=strategy)
            states.append(cluster.state())
        assert restore(tmp_path, 1, strategy=strategy) == 1
        assert cluster.state() == states[0]
        assert restore(tmp_path, strategy=strategy) == number == 3
        assert cluster.state() == states[2]
        compact(tmp_path, 2)
        for version in (2, 3):
            restore(tmp_path, version, strategy=strategy)
            assert cluster.state() == states[version - 1]
        with pytest.raises(NotFoundError, match="no version 1 of tables"):
            restore(tmp_path, 1, strategy=strategy)
        with pytest.raises(DataLossError, match="it is missing"):
            save(tmp_path, since=1, strategy=strategy)
    with pytest.raises(NotFoundError, match="no version 9 of tables"):
        compact(tmp_path, 9)
