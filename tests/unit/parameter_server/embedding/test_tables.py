"""AUC by buckets: its bounds contain the exact AUC, whatever the data and the replicas."""

from __future__ import annotations

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import stratagem as sg
from examples.clicks.law import area_under_curve
from stratagem.errors import DataLossError, NotFoundError
from stratagem.parameter_server.embedding import export
from stratagem.parameter_server.embedding.layer import COMBINERS, pooled, row_initializer
from stratagem.parameter_server.embedding.plan import moved_bytes, server_s
from stratagem.parameter_server.embedding.saving import compact, restore, save
from stratagem.parameter_server.server.tables.table_options import RowInitializer
from tests.unit.parameter_server.embedding.test_serving import strategy_of
from tests.unit.parameter_server.table_clusters import TableCluster as ExportTableCluster
from tests.unit.parameter_server.table_clusters import table_cluster

_ROUNDING = 1e-12
_SCORES = st.floats(0, 1, width=32)


def _counted(labels: Any, scores: Any, **options: Any) -> sg.embedding.AUC:
    metric = sg.embedding.AUC(**options)
    metric.update_state(np.asarray(labels, "float32"), np.asarray(scores, "float32"))
    return metric


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    scores=arrays.arrays(np.float32, 64, elements=_SCORES),
    labels=arrays.arrays(np.float32, 64, elements=st.sampled_from([0.0, 1.0])),
    num_buckets=st.sampled_from([2, 3, 64]),
)
def test_bounds_contain_the_exact_auc(
    scores: np.ndarray, labels: np.ndarray, num_buckets: int
) -> None:
    labels[0], labels[1] = 0, 1
    metric = _counted(labels, scores, num_buckets=num_buckets)
    exact = area_under_curve(labels, scores)
    low, high = metric.bounds()
    assert low - _ROUNDING <= exact <= high + _ROUNDING
    assert abs(float(metric.result()) - exact) <= metric.error_bound() + 1e-6
    assert high - low <= 2 * metric.error_bound() + _ROUNDING


@pytest.mark.parametrize(("is_best", "end"), [(True, 1), (False, 0)])
def test_each_bound_is_attained(is_best: bool, end: int) -> None:
    # In both buckets, all positives are above all negatives, or below.
    scores = np.array([0.1, 0.2, 0.3, 0.6, 0.7, 0.8], np.float32)
    labels = np.array([0, 1, 1, 0, 0, 1] if is_best else [1, 1, 0, 1, 0, 0], np.float32)
    metric = _counted(labels, scores, num_buckets=2)
    assert metric.bounds()[end] == pytest.approx(area_under_curve(labels, scores), abs=1e-12)
    assert metric.error_bound() > 0.2


@pytest.mark.slow
def test_bounds_are_narrow_on_clicks_of_a_known_law() -> None:
    from examples.clicks.law import ClickLaw

    law = ClickLaw(10_000)
    features, labels = law.examples(0, 20_000)
    logits = law.logits(features["ids"], features["numbers"])
    probabilities = law.probabilities(features["ids"], features["numbers"])
    exact = area_under_curve(labels, probabilities)
    by_probability = _counted(labels, probabilities)
    by_logit = _counted(labels, logits, from_logits=True)
    for metric in (by_probability, by_logit):
        assert abs(float(metric.result()) - exact) <= metric.error_bound() < 2e-4


@pytest.mark.slow
def test_whole_weights_count_examples_several_times_and_zero_leaves_them_out() -> None:
    labels, scores = [0, 1, 1, 0], [0.2, 0.3, 0.9, 0.5]
    weighted = sg.embedding.AUC(num_buckets=7)
    weighted.update_state(
        np.array(labels)[:, None], np.array(scores)[:, None], sample_weight=np.array([1, 3, 1, 0])
    )
    repeated = _counted([0, 1, 1, 1, 1], [0.2, 0.3, 0.3, 0.3, 0.9], num_buckets=7)
    assert weighted.bounds() == repeated.bounds()
    assert float(weighted.result()) == float(repeated.result())


@pytest.mark.parametrize("shape", [pytest.param((2, 1), marks=pytest.mark.slow), (2,)])
def test_weights_of_examples_count_for_each_of_their_predictions(shape: tuple[int, ...]) -> None:
    metric = sg.embedding.AUC(num_buckets=4)
    weights = np.array([2, 1]).reshape(shape)
    metric.update_state(np.eye(2), np.array([[0.9, 0.1], [0.3, 0.6]]), sample_weight=weights)
    counts = np.asarray(metric.rest)
    assert counts.tolist() == [[0, 0, 1, 2], [2, 1, 0, 0]]
    alone = sg.embedding.AUC(num_buckets=4)
    alone.update_state(np.array([0, 1]), np.array([0.1, 0.9]), sample_weight=weights)
    assert np.asarray(alone.rest).tolist() == [[0, 0, 0, 1], [2, 0, 0, 0]]


def test_counts_beyond_the_exact_integers_of_float32_are_exact() -> None:
    metric = sg.embedding.AUC(num_buckets=2)
    many = float(2**24)
    metric.update_state([1.0], [0.1], sample_weight=[many])
    for _ in range(3):
        metric.update_state([1.0, 0.0], [0.1, 0.9], sample_weight=[1.0, 1.0])
    positive = np.asarray(metric.carried) + np.asarray(metric.rest, float)
    assert positive[0, 0] == many + 3


@pytest.mark.parametrize("number", [1, 3])
def test_counts_are_the_same_on_any_number_of_replicas(number: int) -> None:
    x = np.linspace(-2, 2, 50, dtype="float32")[:, None]
    y = (np.sin(40 * x) > 0).astype("float32")
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(number)])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Activation("sigmoid")])
        metric = sg.embedding.AUC(num_buckets=16)
        model.compile(loss="mse", metrics=[metric])
    logs = model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
    alone = _counted(y[:, 0], 1 / (1 + np.exp(-x[:, 0])), num_buckets=16)
    assert metric.bounds() == alone.bounds()
    assert logs["auc"] == pytest.approx(float(alone.result()), abs=1e-6)


def test_a_class_that_is_missing_says_nothing() -> None:
    assert _counted([1, 1], [0.2, 0.4]).bounds() == (0.0, 1.0)


def test_a_prediction_that_is_not_a_number_is_not_hidden() -> None:
    assert np.isnan(float(_counted([1, 0], [np.nan, 0.4]).result()))


def test_configuration_makes_the_metric_again() -> None:
    metric = sg.embedding.AUC(num_buckets=12, from_logits=True, name="clicks")
    again = keras.metrics.deserialize(keras.metrics.serialize(metric))
    assert isinstance(again, sg.embedding.AUC)
    assert again.get_config() == metric.get_config()


def test_one_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 buckets"):
        sg.embedding.AUC(num_buckets=1)


# Costs of tables, beside those that were measured.

IdFrequencies = sg.embedding.IdFrequencies
TableCluster = sg.embedding.TableCluster
TableSize = sg.embedding.TableSize

# docs/design/measurements.md, "Placement": 1,024 examples of 8 ids in 400,000 rows of 64, on two
# devices. MB a step in programs, and to and from the third device; the rest of the model included.
_PLACED_MB = {"mirrored": (2.72, 0), "sharded": (4.85, 0), "central": (2.72, 2.10 + 2.16)}


def test_bytes_of_a_step_are_those_measured() -> None:
    found = moved_bytes(TableSize("table", 400_000, 64), IdFrequencies(8 * 1024), 2)
    dense = 512 * 128 + 128 + 128 * 64 + 64 + 64 + 1
    for place, (gathered_mb, host_mb) in _PLACED_MB.items():
        gathered, host = found[place]
        assert (gathered + 2 * 4 * dense) / 1e6 == pytest.approx(gathered_mb, rel=0.03)
        assert host / 1e6 == pytest.approx(host_mb, rel=0.03)


# The same page, "Parameter servers": 1 M rows of 64 by Zipf's law, one worker, two servers on one
# machine. Millions of ids a second.
_SERVED = {
    1_000: {"pulled": 1.3, "pushed": 0.8},
    10_000: {"pulled": 6.3, "pushed": 2.1},
    100_000: {"pulled": 10.7, "pushed": 3.4},
}


@pytest.mark.parametrize("num_ids", _SERVED)
def test_a_step_with_servers_takes_about_what_was_measured(num_ids: int) -> None:
    # Shared memory: a copy of each side.
    cluster = TableCluster(num_servers=2, server_bytes=1e9, server_bytes_per_s=6e9)
    costs = sg.embedding.TableCosts()
    ids = IdFrequencies(num_ids, exponent=1.0)
    own_s = server_s(TableSize("table", 10**6, 64), ids, cluster, costs, 2)
    predicted_s = own_s + 2 * (costs.message_s + costs.client_s)
    measured_s = sum(num_ids / (rate * 1e6) for rate in _SERVED[num_ids].values())
    assert 0.5 < predicted_s / measured_s < 2


def test_a_whole_table_is_bound_by_its_server_when_workers_share_it() -> None:
    table, ids = TableSize("table", 10**6, 64), IdFrequencies(10_000)
    costs = sg.embedding.TableCosts()
    seconds = {
        (workers, shards): server_s(
            table, ids, TableCluster(num_servers=4, num_workers=workers), costs, shards
        )
        for workers in (1, 8)
        for shards in (1, 4)
    }
    assert seconds[8, 1] > 2.5 * seconds[8, 4]
    assert seconds[1, 1] < 2 * seconds[1, 4]


def test_rows_found_in_a_cache_are_not_sent_but_cost_the_worker() -> None:
    table, ids, costs = TableSize("table", 10**6, 64), IdFrequencies(10_000), None
    costs = sg.embedding.TableCosts()
    slow = TableCluster(num_servers=2, server_bytes_per_s=1e8)
    fast = TableCluster(num_servers=2, server_bytes_per_s=1e12)
    half = ids.distinct(10**6) / 2
    assert server_s(table, ids, slow, costs, 2, half) < server_s(table, ids, slow, costs, 2)
    assert server_s(table, ids, fast, costs, 2, half) > server_s(table, ids, fast, costs, 2)


def test_small_tables_have_gradients_of_the_whole() -> None:
    small = moved_bytes(TableSize("days", 7, 16), IdFrequencies(10_000), 4)
    assert small["mirrored"] == (2 * 3 * 7 * 16 * 4, 0)


def test_devices_of_a_target_have_half_of_their_memory_for_tables() -> None:
    target = sg.planning.parse_target("8xH100")
    cluster = TableCluster(target=target)
    assert cluster.free_device_bytes == target.accelerator.pool_bytes / 2
    assert TableCluster().free_device_bytes == 0
    assert TableCluster(num_devices=3).devices.num_devices == 3


@pytest.mark.parametrize("options", [{"num_rows": 0}, {"row_size": 0}, {"num_slots": -1}])
def test_a_table_without_rows_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one row and number"):
        TableSize("t", **{"num_rows": 1, "row_size": 1, **options})


@pytest.mark.parametrize(
    "options", [{"num_devices": 0}, {"num_workers": 0}, {"server_bytes_per_s": 0}]
)
def test_a_cluster_without_devices_or_links_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one device and worker"):
        TableCluster(**options)


# Exported tables, read by pyarrow alone.


def rows_of(cluster: ExportTableCluster) -> dict[int, tuple[float, ...]]:
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
    with pytest.raises(ValueError, match="Tables cannot be exported as 'csv'"):
        export(tmp_path / "rows", format="csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with (
        table_cluster(1) as cluster,
        pytest.raises(ImportError, match=r"export needs pyarrow(.|\n)*pip install 'stratagem\[da"),
    ):
        export(tmp_path / "rows", strategy=strategy_of(cluster))
    assert not os.listdir(tmp_path)


# Distinct rows and rows in a cache, beside simulations and figures that were measured.


@pytest.mark.parametrize("num_rows", [1, 10, 5000, 200_000])
@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.3])
def test_groups_of_ranks_sum_to_the_law(num_rows: int, exponent: float) -> None:
    weights = np.arange(1, num_rows + 1.0) ** -exponent
    chances = weights / weights.sum()
    expected = -np.expm1(300 * np.log1p(-chances[: num_rows if num_rows > 1 else 0])).sum()
    found = IdFrequencies(300, exponent=exponent)
    assert found.distinct(num_rows) == pytest.approx(expected or 1, rel=2e-3)
    bins = found.bins(num_rows)
    assert bins.widths.sum() == num_rows
    assert (bins.widths * bins.probabilities).sum() == pytest.approx(1)


def test_distinct_rows_of_counts_are_those_of_drawn_ids() -> None:
    random = np.random.default_rng(0)
    counts = random.integers(0, 50, 400)
    drawn = random.choice(400, (500, 300), p=counts / counts.sum())
    simulated = np.mean([len(np.unique(step)) for step in drawn])
    assert IdFrequencies(300, counts=counts).distinct(500) == pytest.approx(simulated, rel=0.01)


# docs/guides/parameter_servers.md: a million rows by Zipf's law, and the share of distinct rows of
# a step that a worker's cache had, by its age in steps. The simulation read a real `RowCache`.
_MEASURED = {
    (1_000, 100_000): (694, {1: 9, 4: 20, 16: 32, 64: 45}),
    (10_000, 100_000): (5_350, {1: 12, 4: 25, 16: 42, 64: 52}),
    (10_000, 10_000): (5_350, {1: 12, 4: 19, 16: 19, 64: 19}),
    (100_000, 100_000): (37_500, {1: 16, 4: 35, 16: 36, 64: 36}),
}


@pytest.mark.parametrize(("num_ids", "cache_rows"), _MEASURED)
def test_a_cache_finds_what_was_measured(num_ids: int, cache_rows: int) -> None:
    distinct, percent = _MEASURED[num_ids, cache_rows]
    frequencies = IdFrequencies(num_ids, exponent=1.0)
    assert frequencies.distinct(10**6) == pytest.approx(distinct, rel=0.002)
    for age, wanted in percent.items():
        pulled = frequencies.pulled(10**6, max_rows=cache_rows, max_age_steps=age)
        assert 100 * (1 - pulled / frequencies.distinct(10**6)) == pytest.approx(wanted, abs=1.5)


def test_no_age_and_no_room_pull_all() -> None:
    frequencies = IdFrequencies(100, exponent=1.0)
    every = pytest.approx(frequencies.distinct(1000))
    assert frequencies.pulled(1000, max_rows=1000, max_age_steps=0) == every
    assert frequencies.pulled(1000, max_rows=0, max_age_steps=9) == every


def test_popular_rows_that_are_neighbors_are_on_one_shard() -> None:
    sorted_by_count = IdFrequencies(100, counts=np.arange(1000, 0, -1.0) ** 4)
    shares = sorted_by_count.shard_shares(1000, 4)
    assert shares.sum() == pytest.approx(1)
    assert shares[0] > 2 * shares[1] > 0
    assert IdFrequencies(100, exponent=1.2).shard_shares(1000, 4) == pytest.approx(0.25)


@pytest.mark.parametrize("options", [{"ids_per_step": 0}, {"ids_per_step": 1, "exponent": -1.0}])
def test_numbers_that_mean_nothing_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least one id, and an exponent"):
        IdFrequencies(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("counts", [[], [0, 0], [[1]], [-1, 2]])
def test_counts_without_an_occurrence_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="IdFrequencies received counts of shape"):
        IdFrequencies(1, counts=counts)


def test_more_counts_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="counts of 3 ids for a table of 2 rows"):
        IdFrequencies(1, counts=[1, 2, 3]).distinct(2)


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

    def by_differences(place: int, size: float = 1e-5) -> np.ndarray:
        given = [ROWS, WEIGHTS]
        found = np.zeros(given[place].shape)
        for index in np.ndindex(*found.shape):
            sides = []
            for sign in (1, -1):
                moved = [one.copy() for one in given]
                moved[place][index] += sign * size
                sides.append(np.sin(by_hand(moved[0], MASK, moved[1], combiner)).sum())
            found[index] = (sides[0] - sides[1]) / (2 * size)
        return found

    found = jax.grad(total, (0, 1))(jnp.asarray(ROWS), jnp.asarray(WEIGHTS))
    for place, one in enumerate(found):
        np.testing.assert_allclose(one, by_differences(place), rtol=1e-3, atol=1e-5)


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


def test_integers_are_their_own_keys() -> None:
    keys = sg.embedding.keys(np.array(EXTREMES))
    assert numbers(keys) == [value % 2**64 for value in EXTREMES]
    assert sg.embedding.keys(np.array([EXTREMES])).shape == (1, 7, 2)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint16", "uint64", ">i8"])
def test_integers_of_every_dtype(dtype) -> None:
    largest = int(np.iinfo(np.dtype(dtype).newbyteorder("=")).max)
    assert numbers(sg.embedding.keys(np.array([0, 5, largest], dtype))) == [0, 5, largest]


def test_small_negative_integers_are_those_of_64_bits() -> None:
    assert numbers(sg.embedding.keys(np.array([-1], "int8"))) == [2**64 - 1]


@pytest.mark.parametrize("dtype", ["U", "S", "O"])
def test_strings_have_the_fingerprints_of_tensorflow(dtype) -> None:
    keys = sg.embedding.keys(np.array([["a", "blue", ""]], dtype))
    assert keys.shape == (1, 3, 2)
    assert numbers(keys) == [FINGERPRINTS["a"], FINGERPRINTS["blue"], 0]


def test_one_key_and_none() -> None:
    assert numbers(sg.embedding.keys(7)) == [7]
    assert sg.embedding.keys(7).shape == (2,)
    assert sg.embedding.keys([]).shape == (0, 2)
    assert sg.embedding.keys(np.empty((3, 0), "S4")).shape == (3, 0, 2)


def test_part_of_an_array() -> None:
    values = np.arange(12).reshape(3, 4)[::2, 1:3]
    assert numbers(sg.embedding.keys(values)) == [1, 2, 9, 10]


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


@pytest.mark.parametrize("name", ["glorot_uniform", "orthogonal"])
def test_initializer_that_needs_the_number_of_rows_is_refused(name) -> None:
    with pytest.raises(ValueError, match="DynamicEmbedding received the initializer"):
        row_initializer(keras.initializers.get(name), 9)


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
