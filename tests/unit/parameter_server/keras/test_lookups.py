"""Lookups in tables on parameter servers: which rows travel, and that the numbers are right."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.experimental import io_callback

import stratagem as sg
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from tests.unit.parameter_server.clusters import Asked, coordinated

SHAPE = (9000, 8)
VALUES = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
IDS = np.array([[3, 7, 3], [8999, 7, 0]])
look_up = sg.nn.embedding_lookup

_calls: list[int] = []


class Tables:
    """A model of two tables, whose loss is a function of both."""

    def __init__(self, loss: Callable[[Any, Any, Any], Any]) -> None:
        self.layers = [keras.layers.Embedding(*SHAPE) for _ in range(2)]
        for place, layer in enumerate(self.layers):
            layer.build((None,))
            layer.embeddings.assign(VALUES if place == 0 else VALUES[::-1])
        self.tables = [layer.embeddings for layer in self.layers]
        self.optimizer = keras.optimizers.SGD(0.1)
        self.optimizer.build(self.tables)
        self._loss = loss

    def step(self, ids: Any) -> Any:
        value, grads = sg.value_and_grad(lambda: self._loss(*self.tables, ids), self.tables)
        pairs = [pair for pair in zip(grads, self.tables, strict=True) if pair[0] is not None]
        self.optimizer.apply_gradients(pairs)
        return value


def run(strategy: Any, model: Tables, ids: Any) -> Any:
    parts = strategy.distribute_values_from_function(
        lambda context: jnp.asarray(ids[context.replica_id_in_sync_group])
    )
    return strategy.run(model.step, args=(parts,))


def compare(
    loss: Callable[[Any, Any, Any], Any], ids: Any = IDS[None], *, num_devices: int = 1
) -> tuple[list[int], list[int]]:
    """Trains two steps on a worker and on devices of this process.

    Returns:
        Of each table how many rows, and how many whole values, a worker has asked for.
    """
    devices = [f"cpu:{place}" for place in range(num_devices)]
    local = sg.MirroredStrategy(devices) if num_devices > 1 else sg.OneDeviceStrategy("cpu:0")
    with local.scope():
        expected = Tables(loss)
    losses = [run(local, expected, ids) for _ in range(2)]
    with coordinated(devices_per_worker=num_devices) as coordinator:
        with coordinator.strategy.scope():
            model = Tables(loss)
        asked = Asked(coordinator.strategy.cluster.servers)
        for wanted in losses:
            got = coordinator.schedule(
                lambda ids: run(sg.get_strategy(), model, ids), args=(ids,)
            ).fetch()
            jax.tree.map(
                lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5),
                jax.tree.leaves(got),
                jax.tree.leaves(wanted),
            )
        names = [table.place.name for table in model.tables]
        counts = asked.rows.copy(), asked.whole.copy()
        for one, other in zip(model.tables, expected.tables, strict=True):
            np.testing.assert_allclose(one.numpy(), np.asarray(other.value), rtol=1e-5, atol=1e-6)
    return tuple([count[name] for name in names] for count in counts)


def squares(table: Any, ids: Any) -> Any:
    return jnp.sum(jnp.square(look_up(table, ids)))


_OLD_EMITTERS = "xla_cpu_use_fusion_emitters=false"

LOSSES: dict[str, tuple[Callable[[Any, Any, Any], Any], list[int]]] = {
    # How many different rows of each table two steps ask for.
    "twice": (lambda one, two, ids: squares(one, ids[0]) + squares(one, ids[1, :2]), [6, 0]),
    "two_tables": (lambda one, two, ids: squares(one, ids) + squares(two, ids[1, 1]), [8, 2]),
    "negative_and_not": (
        lambda one, two, ids: squares(one, jnp.concatenate([ids[1], -1 - ids[1]])),
        [8, 0],
    ),
    "of_floats": (
        lambda one, two, ids: squares(one, (ids.astype("float32") + 0.5).astype("int32")),
        [8, 0],
    ),
    "of_8_bits": (lambda one, two, ids: squares(one, (ids % 100).astype("uint8")), [8, 0]),
    "scalar": (lambda one, two, ids: squares(one, ids[0, 1]), [2, 0]),
    "empty": (lambda one, two, ids: squares(one, ids[:0]) + squares(two, ids), [0, 8]),
}


@pytest.mark.compatibility
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in {"twice", "negative_and_not"} else pytest.mark.slow)
        for name in LOSSES
    ],
)
def test_only_the_rows_travel(name) -> None:
    if name == "of_8_bits" and _OLD_EMITTERS in os.environ.get("XLA_FLAGS", ""):
        pytest.skip("XLA's older emitters miscompute rows of 8-bit numbers")
    loss, num_rows = LOSSES[name]
    assert compare(loss) == (num_rows, [0, 0])


def test_rows_of_several_devices_travel_together() -> None:
    ids = np.stack([IDS, IDS[::-1] + np.array([[0, 0, 1], [-1, 1, 0]])])
    _, whole = compare(LOSSES["negative_and_not"][0], ids, num_devices=2)
    assert whole == [0, 0]


def _read_as_well(one: Any, two: Any, ids: Any) -> Any:
    return squares(one, ids) + 0.5 * jnp.sum(jnp.square(one.value)) + squares(two, ids)


def _scanned(one: Any, two: Any, ids: Any) -> Any:
    step = lambda total, own: (total + squares(one, own), None)  # noqa: E731
    return jax.lax.scan(step, 0.0, ids)[0]


def _rematerialised(one: Any, two: Any, ids: Any) -> Any:
    return jax.checkpoint(lambda own: squares(one, own))(ids)


def _of_gradients(one: Any, two: Any, ids: Any) -> Any:
    _, (gradient,) = sg.value_and_grad(lambda: squares(one, ids), [one])
    return jnp.sum(jnp.square(gradient)) + squares(two, ids)


@pytest.mark.compatibility
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(_read_as_well, marks=pytest.mark.slow),
        _scanned,
        pytest.param(_rematerialised, marks=pytest.mark.slow),
        pytest.param(_of_gradients, marks=pytest.mark.slow),
    ],
)
def test_what_is_more_than_a_lookup_reads_the_table(loss) -> None:
    rows, whole = compare(loss)
    assert whole[0] == 2
    assert rows == ([0, 8] if loss in (_read_as_well, _of_gradients) else [0, 0])


# One cluster for what changes nothing


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ClusterCoordinator]:
    with coordinated() as made:
        yield made


@pytest.fixture(scope="module")
def table(coordinator: ClusterCoordinator) -> Any:
    with coordinator.strategy.scope():
        layer = keras.layers.Embedding(*SHAPE)
        layer.build((None,))
    layer.embeddings.assign(VALUES)
    return layer.embeddings


def in_step(coordinator: ClusterCoordinator, step: Callable[..., Any], *args: Any) -> Any:
    return coordinator.schedule(
        lambda *args: sg.get_strategy().run(step, args=args), args=args
    ).fetch()


@pytest.mark.compatibility
def test_lookup_without_a_gradient_asks_for_rows(coordinator, table) -> None:
    asked = Asked(coordinator.strategy.cluster.servers)
    got = in_step(coordinator, lambda ids: look_up(table, ids), IDS)
    np.testing.assert_array_equal(got, VALUES[IDS])
    assert (asked.rows[table.place.name], asked.whole[table.place.name]) == (4, 0)


def test_layer_that_nobody_trains_asks_for_rows(coordinator, table) -> None:
    with coordinator.strategy.scope():
        other = sg.Variable(np.float32(2.0))
    asked = Asked(coordinator.strategy.cluster.servers)

    def step(ids: Any) -> Any:
        loss = lambda: other * squares(table, ids)  # noqa: E731
        return sg.value_and_grad(loss, [other])

    value, (gradient,) = in_step(coordinator, step, IDS)
    expected = np.square(VALUES[IDS]).sum()
    np.testing.assert_allclose([value, gradient], [2 * expected, expected], rtol=1e-5)
    assert (asked.rows[table.place.name], asked.whole[table.place.name]) == (4, 0)


@pytest.mark.compatibility
def test_ids_may_come_from_variables(coordinator, table) -> None:
    with coordinator.strategy.scope():
        offset = sg.Variable(np.array([1, 2], "int32"), trainable=False)

    def step(ids: Any) -> Any:
        offset.assign_add(jnp.asarray([1, 1]))
        return look_up(table, ids + offset.value)

    got = [in_step(coordinator, step, np.array([10, 20], "int32")) for _ in range(2)]
    np.testing.assert_array_equal(got, [VALUES[[12, 23]], VALUES[[13, 24]]])


def _follows(table: Any, ids: Any) -> Any:
    first = look_up(table, ids)
    return look_up(table, jnp.abs(first[:, 0] * 100).astype("int32"))


@pytest.mark.compatibility
@pytest.mark.parametrize(
    ("look", "ids", "error", "words"),
    [
        (look_up, [0, 9000], IndexError, "were looked up in"),
        (look_up, [-9001], IndexError, "were looked up in"),
        (_follows, IDS[0], ValueError, "computes from other looked-up rows"),
    ],
)
def test_ids_that_a_table_does_not_have_or_that_follow_from_rows_are_refused(
    coordinator, table, look, ids, error, words
) -> None:
    value = coordinator.schedule(
        lambda ids: sg.get_strategy().run(lambda ids: look(table, ids), args=(ids,)),
        args=(np.array(ids),),
    )
    for wait in (coordinator.join, value.fetch):
        with pytest.raises(error, match=words):
            wait()


def _note(number: Any) -> None:
    _calls.append(int(np.asarray(number)))


def test_what_a_step_does_besides_is_done_once(coordinator, table) -> None:
    def step(ids: Any) -> Any:
        io_callback(_note, None, ids[0])
        jax.debug.callback(_note, ids[1])
        return look_up(table, ids)

    _calls.clear()
    in_step(coordinator, step, np.array([5, 6]))
    assert sorted(_calls) == [5, 6]


@pytest.mark.compatibility
def test_ids_may_come_from_a_callback(coordinator, table) -> None:
    def step(ids: Any) -> Any:
        own = jax.pure_callback(lambda ids: np.asarray(ids) + 1, ids, ids)
        return look_up(table, own)

    got = in_step(coordinator, step, IDS - 1)
    np.testing.assert_array_equal(got, VALUES[IDS])
