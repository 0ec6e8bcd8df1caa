"""Functions of `sg.embedding`: exports, pooled rows, keys, initializers and saved versions."""

from __future__ import annotations

import os
import sys
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
from stratagem.parameter_server.embedding.saving import compact, restore, save
from stratagem.parameter_server.server.tables.table_options import RowInitializer
from tests.unit.parameter_server.embedding.test_serving import strategy_of
from tests.unit.parameter_server.table_clusters import TableCluster, table_cluster

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


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint16", "uint64", ">i8"])
def test_integers_of_every_dtype(dtype) -> None:
    largest = int(np.iinfo(np.dtype(dtype).newbyteorder("=")).max)
    assert numbers(sg.embedding.keys(np.array([0, 5, largest], dtype))) == [0, 5, largest]


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
