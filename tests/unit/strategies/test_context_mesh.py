"""`jax.set_mesh` around, before and inside what a strategy does: it changes no number."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stratagem as sg

_X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
_Y = _X.sum(axis=1, keepdims=True)

_DEVICES = {
    "all": ((2, 2), ("data", "model"), (0, 1, 2, 3)),
    "same": ((2,), ("replica",), (0, 1)),  # our devices, and our name of an axis
    "other": ((2,), ("data",), (2, 3)),
    "one": ((1,), ("data",), (0,)),
}


def _mesh(kind: str) -> jax.sharding.Mesh:
    axis_type, where = kind.split("_")
    shape, names, places = _DEVICES[where]
    types = (AxisType.Explicit if axis_type == "explicit" else AxisType.Auto,) * len(shape)
    devices = [jax.local_devices(backend="cpu")[place] for place in places]
    return jax.make_mesh(shape, names, axis_types=types, devices=devices)


_WAYS = ("around", "in_scope", "for_good")


@contextlib.contextmanager
def _set(way: str, strategy: Callable[[], sg.Strategy], kind: str) -> Iterator[sg.Strategy]:
    mesh = _mesh(kind)
    if way == "around":
        with jax.set_mesh(mesh):
            yield strategy()
        return
    made = strategy()
    if way == "in_scope":
        with made.scope(), jax.set_mesh(mesh):
            yield made
        return
    jax.set_mesh(mesh)
    try:
        yield made
    finally:
        jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


_STRATEGIES: dict[str, Callable[[], sg.Strategy]] = {
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one_device": lambda: sg.OneDeviceStrategy("cpu:1"),
    "sharded": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
    "groups": lambda: sg.MirroredStrategy([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]),
    "central": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0"),
}


def _model(strategy: sg.Strategy) -> keras.Model:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    return model


def _fit(strategy: sg.Strategy) -> Any:
    model = _model(strategy)
    history = model.fit(
        _X, _Y, batch_size=4, epochs=2, verbose=0, shuffle=False, validation_data=(_X, _Y)
    )
    batches = strategy.distribute_dataset(sg.input.Dataset((_X, _Y), batch_size=4))
    again = model.fit(batches, verbose=0)
    return history.history, again.history, model.get_weights()


def _evaluate(strategy: sg.Strategy) -> Any:
    model = _model(strategy)
    logs = model.evaluate(_X, _Y, batch_size=4, verbose=0), model.train_on_batch(_X, _Y)
    return logs, model.predict(_X, batch_size=4, verbose=0), model.predict_on_batch(_X), model(_X)


def _loop(strategy: sg.Strategy) -> Any:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer, metric = keras.optimizers.Adam(0.1), keras.metrics.MeanSquaredError()

    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            return sg.compute_average_loss(jnp.square(model(x) - y)[:, 0])

        value, gradients = sg.value_and_grad(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(y, model(x))
        return value

    @sg.function
    def summed(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    losses = []
    for x, y in strategy.distribute_dataset(sg.input.Dataset((_X, _Y), batch_size=4)):
        losses.append(strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None) / 2)
        losses.append(summed(x, y) * jnp.ones(()))
    metric.update_state(jnp.ones(3), np.zeros(3, "float32"))
    optimizer.apply([jnp.ones(v.shape) for v in model.trainable_variables])
    return losses, metric.result(), model.get_weights(), optimizer.iterations.numpy()


def _eagerly(strategy: sg.Strategy) -> Any:
    sg.config.run_eagerly(True)
    try:
        return _loop(strategy)
    finally:
        sg.config.run_eagerly(False)


def _values(strategy: sg.Strategy) -> Any:
    def step(x: Any) -> Any:
        context = sg.get_replica_context()
        total = context.all_reduce("SUM", x.sum())
        mean = context.merge_call(lambda s, v: s.reduce("MEAN", v, axis=None), args=(total,))
        return total, context.all_gather(x, axis=0).sum(), mean

    (batch,) = strategy.distribute_dataset([_X])
    parts = strategy.local_results(strategy.run(step, args=(batch,)))
    own = strategy.distribute_values_from_function(lambda _: jnp.ones((2, 3)))
    reduced = [strategy.reduce("MEAN", own, axis=axis) + jnp.ones(3) for axis in (None, 0)]
    plain = strategy.run(lambda x: 2 * x, args=(jnp.ones(3),))
    steps = strategy.run_steps(
        lambda carry, x: (carry + x.sum(), carry),
        iter(strategy.distribute_dataset([_X, _X])),
        2,
        reduce="SUM",
        carry=jnp.zeros(()),
    )
    return parts, reduced, steps, [sum(strategy.local_results(plain)), strategy.gather(own, axis=0)]


def _variables(strategy: sg.Strategy) -> Any:
    with strategy.scope():
        mirrored = sg.Variable(jnp.arange(3.0))
        drawn = keras.Variable(lambda shape, dtype: jnp.ones(shape, dtype), shape=(2,))
        total = sg.Variable(0.0, synchronization="on_read", aggregation="sum")
    mirrored.assign(jnp.full(3, 2.0))
    mirrored.assign_add(np.ones(3, "float32"))
    mirrored.assign_sub(jnp.ones(3))
    strategy.run(lambda: total.assign_add(2.0))
    strategy.extended.update(drawn, lambda v, x: v.assign(x * v), args=(jnp.full(2, 3.0),))
    read = [mirrored + jnp.ones(3), mirrored.numpy(), drawn.value * 2, jnp.sum(drawn.value)]
    with tempfile.TemporaryDirectory() as folder:
        path = sg.Checkpoint(mirrored=mirrored, drawn=drawn).save(f"{folder}/checkpoint")
        mirrored.assign(jnp.zeros(3))
        sg.Checkpoint(mirrored=mirrored, drawn=drawn).restore(path)
    return read, mirrored.value, total.value


_ENTRIES: dict[str, Callable[[sg.Strategy], Any]] = {
    "fit": _fit,
    "evaluate": _evaluate,
    "loop": _loop,
    "eagerly": _eagerly,
    "values": _values,
    "variables": _variables,
}


# All others are for the slow tests.
_QUICK = {
    ("mirrored", "explicit_all", "around"): {"fit", "loop", "variables"},
    ("mirrored", "auto_other", "in_scope"): {"values", "variables"},
    ("one_device", "explicit_same", "for_good"): {"values", "variables"},
}


def _rows() -> Iterator[Any]:
    kinds = [f"{axes}_{where}" for axes in ("explicit", "auto") for where in _DEVICES]
    of_others = [
        ("explicit_all", "around"),
        ("auto_other", "in_scope"),
        ("explicit_same", "for_good"),
    ]
    for row in (
        *itertools.product(["mirrored"], kinds, _WAYS),
        *((name, *one) for name in _STRATEGIES if name != "mirrored" for one in of_others),
    ):
        for entry in _ENTRIES:
            marks = () if entry in _QUICK.get(row, ()) else (pytest.mark.slow,)
            yield pytest.param(*row, entry, id="-".join([*row, entry]), marks=marks)


def _flat(values: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(values)]


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, str], Any]:
    """Results without a mesh, by strategy and entry."""
    return {}


@pytest.mark.parametrize(("strategy", "kind", "way", "entry"), list(_rows()))
def test_a_context_mesh_changes_no_result(expected, strategy, kind, way, entry) -> None:
    if (strategy, entry) not in expected:
        expected[strategy, entry] = _flat(_ENTRIES[entry](_STRATEGIES[strategy]()))
    with _set(way, _STRATEGIES[strategy], kind) as made:
        mesh = jax.sharding.get_mesh()
        results = _ENTRIES[entry](made)
        assert jax.sharding.get_mesh() == mesh
    for got, wanted in zip(_flat(results), expected[strategy, entry], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


_Use = Callable[[sg.Strategy, jax.Array], Any]


def _assigned(strategy: sg.Strategy, x: jax.Array) -> Any:
    with strategy.scope():
        variable = sg.Variable(x)
    variable.assign(2 * x)
    return variable.value


def _eager_argument(strategy: sg.Strategy, x: jax.Array) -> Any:
    sg.config.run_eagerly(True)
    try:
        return _USES["argument"](strategy, x)
    finally:
        sg.config.run_eagerly(False)


_USES: dict[str, _Use] = {
    "eager_argument": _eager_argument,
    "argument": lambda s, x: s.local_results(s.run(lambda x: (x.reshape(-1) * 2).sum(), args=(x,))),
    "function": lambda s, x: sg.function(
        lambda x: s.reduce("SUM", s.run(lambda x: x.T @ x, args=(x,)), axis=None)
    )(x),
    "batches": lambda s, x: [s.gather(batch, axis=0) for batch in s.distribute_dataset([x, x])],
    "dataset": lambda s, x: [
        s.gather(batch, axis=0) for batch in s.distribute_dataset(sg.input.Dataset(x, batch_size=3))
    ],
    "values": lambda s, x: s.reduce("MEAN", s.distribute_values_from_function(lambda _: x), axis=0),
    "reduced": lambda s, x: s.reduce("MEAN", x, axis=0),
    "assigned": _assigned,
    "predicted": lambda s, x: _model(s).predict(x, batch_size=3, verbose=0),
}


@pytest.mark.parametrize("use", _USES)
def test_arrays_on_explicit_axes_are_taken(use: str) -> None:
    whole = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")
    make = _STRATEGIES["mirrored"]
    wanted = _flat(_USES[use](make(), jnp.asarray(whole)))
    for kind, is_split in itertools.product(("explicit_all", "explicit_same"), (True, False)):
        mesh = _mesh(kind)
        spec = PartitionSpec(mesh.axis_names[0]) if is_split else PartitionSpec()
        sharded = jax.device_put(whole, NamedSharding(mesh, spec))
        outside = _flat(_USES[use](make(), sharded))
        with jax.set_mesh(mesh):
            inside = _flat(_USES[use](make(), sharded))
        for got in (outside, inside):
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5)


def test_explicit_arrays_that_a_step_cannot_take_are_refused_with_what_to_do() -> None:
    strategy, mesh = _STRATEGIES["mirrored"](), _mesh("explicit_all")
    sharded = jax.device_put(_X[:4], NamedSharding(mesh, PartitionSpec("data")))

    def total(x: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(jnp.sum, args=(x,)), axis=None)

    with pytest.raises(ValueError, match=r"(?s)explicit axes.*Fix: pass it to the step"):
        strategy.run(lambda: sharded.sum())
    with pytest.raises(ValueError, match=r"(?s)inside jax.jit.*explicit axes.*use sg.function"):
        jax.jit(total)(sharded)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="context mesh") as raised:
        jax.jit(total)(jnp.ones(3))
    assert "use sg.function in place of jax.jit" in "".join(raised.value.__notes__)
