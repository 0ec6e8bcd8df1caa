"""Keras's optimizers on servers, against themselves in one process, and what is refused."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.client.variable_client import Scalar
from stratagem.parameter_server.keras import update_rule
from stratagem.parameter_server.keras.update_rule import KerasUpdate
from stratagem.parameter_server.server.shards import ShardSpec
from stratagem.parameter_server.server.store import ServerVariables
from tests.unit.parameter_server.clusters import coordinated
from tests.unit.parameter_server.keras.trained_models import (
    NUM_STEPS,
    X,
    Y,
    dense_model,
    gradients_of,
)

OPTIMIZERS = {
    "sgd": keras.optimizers.SGD(0.1),
    "momentum": keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": keras.optimizers.Adam(0.01),
    "amsgrad": keras.optimizers.Adam(0.01, amsgrad=True),
    "schedule": keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "adamw": keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "adagrad": keras.optimizers.Adagrad(0.1),
    "adadelta": keras.optimizers.Adadelta(0.5),
    "adamax": keras.optimizers.Adamax(0.01),
    "nadam": keras.optimizers.Nadam(0.01),
    "ftrl": keras.optimizers.Ftrl(0.1),
    "lion": keras.optimizers.Lion(0.01),
    "rmsprop": keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "average": keras.optimizers.SGD(0.1, use_ema=True),
    "accumulated": keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("is_told", [False, True])
def test_another_rate_is_another_rule_unless_it_comes_with_each_push(is_told) -> None:
    described: list[object] = []
    for rate in (0.1, 0.2):
        start = {"iteration": np.int32(3), "learning_rate": np.float32(rate)}
        optimizer = keras.optimizers.SGD(rate)
        rule = KerasUpdate(optimizer, start=start, is_told_scalars=is_told)
        assert rule.scalars().keys() == start.keys()
        described.append(rule.describe())
    assert (described[0] == described[1]) == is_told
    other = KerasUpdate(keras.optimizers.SGD(0.1, momentum=0.5), start=start, is_told_scalars=True)
    assert other.describe() != described[0]


@pytest.mark.compatibility
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in {"sgd", "adam"} else pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_update_is_that_of_the_optimizer(name) -> None:
    optimizer = OPTIMIZERS[name]
    rng = np.random.default_rng(0)
    arrays = {
        "a/kernel": rng.normal(size=(6, 3)).astype("float32"),
        "a/bias": rng.normal(size=()).astype("float32"),
    }
    store = ServerVariables()
    for name, value in arrays.items():
        store.create(ShardSpec(name, value.shape, "float32"), lambda value=value: value)
    rule = pickle.loads(cloudpickle.dumps(KerasUpdate(optimizer)))
    store.set_rule(rule, list(arrays))
    own = type(optimizer).from_config(optimizer.get_config())
    variables = [keras.Variable(value) for value in arrays.values()]
    for _ in range(5):
        grads = {name: rng.normal(size=v.shape).astype("float32") for name, v in arrays.items()}
        store.update(grads, {})
        own.apply(list(grads.values()), variables)
    for got, variable in zip(store.pull(list(arrays)), variables, strict=True):
        np.testing.assert_allclose(got, np.asarray(variable.value), rtol=2e-5, atol=1e-6)
    assert int(np.asarray(store.scalars["iteration"])) == int(own.variables[0].value)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "amsgrad", "accumulated"])
def test_rows_by_key_are_updated_as_numbered_rows_are(name) -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, 50)
    fields = {"kind": "normal", "a": 0.0, "b": 1.0, "seed": 2}
    store = ServerVariables()
    store.create(ShardSpec("keyed", (0, 3), "float32", 0, True, {"initializer": fields}))
    values = store.pull_rows("keyed", keys)
    store.create(ShardSpec("table", (50, 3), "float32", has_rows=True), lambda: values)
    rule = KerasUpdate(OPTIMIZERS[name])
    store.set_rule(rule, ["keyed"], "keyed")
    store.set_rule(rule, ["table"], "table")
    for count in (3, 20, 10):
        rows = np.sort(rng.choice(50, count, replace=False))
        grads = rng.normal(size=(count, 3)).astype("float32")
        parts = {"table": (rows, grads), "keyed": (keys[rows], grads)}
        store.update({}, parts, {"table": "table", "keyed": "keyed"})
    slots = [slot.name for slot in rule.slots("table", (50, 3), "float32")]
    for suffix in ["", *slots]:
        names = [one + (f":{one}.{suffix}" if suffix else "") for one in ("keyed", "table")]
        got, wanted = store.pull_rows(names[0], keys), store.pull([names[1]])[0]
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7, err_msg=suffix)


def test_another_number_of_rows_compiles_nothing() -> None:
    store = ServerVariables()
    store.create(ShardSpec("table", (99, 7), "float32", has_rows=True), lambda: np.ones((99, 7)))
    store.set_rule(KerasUpdate(OPTIMIZERS["adagrad"]), ["table"])
    compiled: list[str] = []

    def note(event: str, duration_s: float, **labels: object) -> None:
        compiled.append(event)

    store.update({}, {"table": (np.arange(40), np.ones((40, 7), np.float32))})
    jax.monitoring.register_event_duration_secs_listener(note)
    for count in (41, 42, 63):
        store.update({}, {"table": (np.arange(count), np.ones((count, 7), np.float32))})
    assert compiled == []
    jax.jit(lambda x: x + count)(1)
    assert any("compile" in event for event in compiled)


def test_gradients_are_not_clipped_again() -> None:
    store = ServerVariables()
    store.create(ShardSpec("v", (2,), "float32"), lambda: np.zeros(2))
    store.set_rule(KerasUpdate(keras.optimizers.SGD(1.0, global_clipnorm=0.1)), ["v"])
    store.update({"v": np.ones(2, np.float32)}, {})
    np.testing.assert_allclose(store.pull(["v"])[0], -1.0, rtol=1e-6)


def test_slots_that_begin_with_different_numbers_are_refused() -> None:
    class Uneven(keras.optimizers.SGD):
        """Its slot is drawn by chance."""

        def build(self, variables) -> None:
            super().build(variables)
            for variable in variables:
                self.add_variable_from_reference(variable, "noise", initializer="random_normal")

    store = ServerVariables()
    store.create(ShardSpec("v", (4, 3), "float32"), lambda: np.zeros((4, 3)))
    with pytest.raises(NotImplementedError, match="'noise' of Uneven has different initial"):
        store.set_rule(KerasUpdate(Uneven(1.0)), ["v"])


class _Unstored(keras.optimizers.SGD):
    """Has an argument that neither its config nor an attribute knows."""

    def __init__(self, power: float, *, label: str) -> None:
        super().__init__(0.1)
        self.power = power


def test_optimizer_that_servers_cannot_make_is_refused_at_once() -> None:
    with pytest.raises(NotImplementedError, match=r"returns the arguments \['label'\] too"):
        KerasUpdate(_Unstored(2.0, label="a"))


# Rows of several tables, updated apart: the same bits as together, and few programs.

TABLES = {"a/part_0": 5, "b": 5, "wide": 7, "c/part_1": 5, "undecayed/part_2": 5, "wide 2": 7}
NUM_ROWS = 300


class Server:
    """Tables of random rows, and a kernel, that one optimizer trains."""

    def __init__(self, optimizer: Any, tables: dict[str, int] = TABLES) -> None:
        rng = np.random.default_rng(0)
        self.tables = tables
        self.store = ServerVariables()
        for name, width in tables.items():
            self._create(ShardSpec(name, (NUM_ROWS, width), "float32", has_rows=True), rng)
        self._create(ShardSpec("kernel", (70, 5), "float32"), rng)
        self.rule = KerasUpdate(optimizer, ["undecayed"])
        self.names = [*tables, "kernel"]
        self.store.set_rule(self.rule, self.names)
        self.num_before = len(self.rule._programs)

    def _create(self, spec: ShardSpec, rng: np.random.Generator) -> None:
        value = rng.normal(size=spec.shape).astype("float32")
        self.store.create(spec, lambda: value)

    @property
    def programs(self) -> list[list[str]]:
        """Names of the arrays of each program for updates."""
        programs = [*self.rule._programs][self.num_before :]
        return [[name for name, _, _ in shapes] for shapes in programs]

    def push(self, counts: list[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        rows = {
            name: (
                rng.choice(NUM_ROWS, count, replace=False),
                rng.normal(size=(count, width)).astype("float32"),
            )
            for count, (name, width) in zip(counts, self.tables.items(), strict=True)
        }
        self.store.update({"kernel": rng.normal(size=(70, 5)).astype("float32")}, rows)

    def state(self) -> dict[str, Any]:
        slots = [slot.name for slot in self.rule.slots("b", (2, 5), "float32")]
        names = [*self.names, *(f"{name}:{slot}" for name in self.names for slot in slots)]
        return dict(zip(names, self.store.pull(names), strict=True)) | self.store.scalars


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"sgd", "adam", "schedule"}))
def test_rows_apart_have_the_bits_of_those_in_one_program(name, monkeypatch) -> None:
    apart, together = Server(OPTIMIZERS[name]), Server(OPTIMIZERS[name])
    for seed, counts in enumerate([[3, 70, 64, 130, 2, 9], [0, 65, 60, 200, 1, 0]]):
        apart.push(counts, seed)
        with monkeypatch.context() as patch:
            patch.setattr(update_rule, "_ELEMENTWISE", frozenset())
            together.push(counts, seed)
    for key, value in together.state().items():
        np.testing.assert_array_equal(apart.state()[key], value, err_msg=key)
    shared = [names for names in apart.programs if names == ["stratagem_rows"]]
    assert len(shared) == 4  # sizes and widths; the undecayed table has its own
    assert [sorted(names) for names in together.programs] == [sorted(["kernel", *TABLES])]


def test_wavering_sizes_compile_few_programs() -> None:
    server = Server(keras.optimizers.SGD(0.1), {f"table {place}": 3 for place in range(12)})
    rng = np.random.default_rng(0)
    sizes: set[tuple[int, ...]] = set()
    for seed in range(40):
        counts = rng.integers(60, 69, 12).tolist()  # padded to 64 or 128
        sizes.add(tuple(count > 64 for count in counts))
        server.push(counts, seed)
    assert len(sizes) > 30  # of as many programs, together
    assert len(server.programs) == 3


class OwnSGD(keras.optimizers.SGD):
    """May do anything."""


@pytest.mark.parametrize("optimizer", [keras.optimizers.Lamb(0.1), OwnSGD(0.1)])
def test_optimizers_that_may_look_at_an_array_get_all_at_once(optimizer) -> None:
    server = Server(optimizer, {"one": 3, "two": 3})
    server.push([5, 9])
    assert sorted(server.programs[0]) == ["kernel", "one", "two"]


# Optimizers whose variables are on servers: how they are built, and what they refuse.


optimizers = keras.optimizers


# Optimizers that are built in different places


@pytest.mark.slow
def test_optimizer_that_a_worker_builds_is_built_here_too() -> None:
    with coordinated(num_workers=2) as coordinator:
        with coordinator.strategy.scope():
            model, optimizer = dense_model(), optimizers.Adam(0.05)
        assert not optimizer.built
        assert float(optimizer.learning_rate.value) == pytest.approx(0.05)
        optimizer.learning_rate = 0.01

        def train(x: Any, y: Any) -> None:
            _, gradients = gradients_of(model, x, y)
            optimizer.apply(gradients, model.trainable_variables)

        def step(x: Any, y: Any) -> None:
            def run(x: Any, y: Any) -> None:
                sg.get_strategy().run(train, args=(x, y))

            coordinator.schedule(run, args=(x, y)).fetch()

        for x, y in zip(X, Y, strict=True):
            step(x, y)
        assert optimizer.built
        assert int(optimizer.iterations.value) == NUM_STEPS
        assert isinstance(optimizer.iterations.place, Scalar)
        assert len(optimizer.variables) == 2 + 2 * len(model.trainable_variables)
        moment = optimizer.variables[2].numpy()
        assert moment.shape == model.layers[0].kernel.shape
        assert moment.any()
        assert float(optimizer.learning_rate.value) == pytest.approx(0.01)
        assert optimizer.get_config()["learning_rate"] == pytest.approx(0.01)
        # And what is assigned here is there.
        optimizer.variables[2].assign(np.zeros_like(moment))
        optimizer.learning_rate = 0.0
        before = [v.numpy() for v in model.trainable_variables]
        step(X[0], Y[0])
        for one, other in zip(model.trainable_variables, before, strict=True):
            np.testing.assert_array_equal(one.numpy(), other)
        assert int(optimizer.iterations.value) == NUM_STEPS + 1


@pytest.mark.compatibility
def test_updates_are_counted_wherever_the_variables_are() -> None:
    with coordinated(num_servers=3) as coordinator:
        with coordinator.strategy.scope():
            sg.Variable(np.zeros(2, "float32"), trainable=False)  # the only one of its server
            v = sg.Variable(np.zeros(2, "float32"))
            optimizer = optimizers.SGD(1.0)

        def step() -> None:
            optimizer.apply([jnp.ones(2)], [v])

        for _ in range(3):
            coordinator.schedule(lambda: sg.get_strategy().run(step)).fetch()
        assert int(optimizer.iterations.value) == 3
        assert v.numpy().tolist() == [-3, -3]


# Parts of the variables


def test_variables_without_a_gradient_are_left_alone(coordinator, strategy) -> None:
    with strategy.scope():
        v, w = (sg.Variable(np.ones(2, "float32")) for _ in range(2))
        optimizer = optimizers.SGD(1.0, momentum=0.5)
        optimizer.build([v, w])

    def step(*grads: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras says which have none
            optimizer.apply(list(grads), [v, w])

    def function(*grads: Any) -> None:
        sg.get_strategy().run(step, args=grads)

    ones = np.ones(2, "float32")
    coordinator.schedule(function, args=(ones, ones)).fetch()
    coordinator.schedule(function, args=(ones, None)).fetch()
    assert v.numpy().tolist() == [-1.5, -1.5]
    assert w.numpy().tolist() == [0, 0]
    coordinator.schedule(function, args=(None, None))
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        coordinator.join()
    coordinator.schedule(lambda: sg.get_strategy().run(lambda: optimizer.apply([], [])))
    coordinator.join()
    assert int(optimizer.iterations.value) == 2


def test_gradients_that_are_reduced_already_are_not_summed_again() -> None:
    with coordinated(devices_per_worker=2) as coordinator:
        with coordinator.strategy.scope():
            v = sg.Variable(np.zeros(2, "float32"))
            optimizer = optimizers.SGD(1.0)
            optimizer.build([v])

        def step() -> None:
            grad = sg.get_replica_context().all_reduce("mean", jnp.full(2, 3.0))
            sg.apply_gradients(optimizer, [(grad, v)], skip_gradients_aggregation=True)

        coordinator.schedule(lambda: sg.get_strategy().run(step)).fetch()
        assert v.numpy().tolist() == [-3, -3]


@pytest.mark.parametrize("is_in_scope", [True, False])
def test_plain_gradients_at_the_coordinator_update_what_servers_hold(strategy, is_in_scope) -> None:
    with strategy.scope():
        v = keras.Variable(np.arange(4.0, dtype="float32"))
        optimizer = optimizers.SGD(0.5, momentum=0.5)
    for _ in range(2):
        with strategy.scope() if is_in_scope else contextlib.nullcontext():
            optimizer.apply([jnp.ones(4)], [v])
    assert np.asarray(v).tolist() == [-1.25, -0.25, 0.75, 1.75]
    assert int(optimizer.iterations) == 2


# What is refused


def _plain(optimizer: Any, v: Any, w: Any) -> None:
    optimizer.apply([jnp.ones((2, 3))], [v])


def _of_another(optimizer: Any, v: Any, w: Any) -> None:
    _plain(optimizer, v, w)
    _plain(optimizer, w, v)


def _in_a_loop(optimizer: Any, v: Any, w: Any) -> None:
    optimizer.build([v, w])

    def update(count: Any, _: Any) -> Any:
        optimizer.apply([jnp.ones((2, 3)), jnp.ones((2, 3))], [v, w])
        return count, None

    jax.lax.scan(update, 0, length=2)


@pytest.mark.parametrize(
    ("make", "step", "error", "words"),
    [
        (
            lambda: optimizers.SGD(clipnorm=1.0, gradient_accumulation_steps=2),
            _plain,
            NotImplementedError,
            "accumulates gradients and clips their norm",
        ),
        (
            lambda: optimizers.LossScaleOptimizer(optimizers.SGD()),
            _plain,
            RuntimeError,
            r"was built in a function on a worker[\s\S]*build\(variables\) before",
        ),
        (optimizers.SGD, _of_another, ValueError, "but was not built for them"),
        (optimizers.SGD, _in_a_loop, ValueError, "was applied inside lax.cond"),
    ],
    ids=["accumulates and clips", "scales", "not built for it", "loop"],
)
def test_update_that_servers_cannot_make_is_refused(
    coordinator, strategy, make, step, error, words
) -> None:
    with strategy.scope():
        v, w = (sg.Variable(np.ones((2, 3), "float32")) for _ in range(2))
        optimizer = make()
    coordinator.schedule(lambda: sg.get_strategy().run(lambda: step(optimizer, v, w)))
    with pytest.raises(error, match=words):
        coordinator.join()
    with strategy.scope():
        optimizer = optimizers.Adafactor()
        optimizer.build([v])
    with pytest.raises(NotImplementedError, match="whose shapes do not match its variables"):
        coordinator.schedule(lambda: optimizer.apply([np.ones((2, 3))], [v]))
