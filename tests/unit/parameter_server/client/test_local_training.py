"""Workers' own weights between synchronizations: messages, staleness, restarts."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.cluster.remote_state_strategy import RemoteStateStrategy
from stratagem.strategies.base.self_description import transfers_of
from tests.unit.parameter_server.clusters import OneThatDies
from tests.unit.parameter_server.local_models import (
    FIT,
    IDS,
    LastingCluster,
    X,
    Y,
    counting_messages,
    dense,
    independent,
    mode_of,
    table,
    weights,
)
from tests.unit.parameter_server.shared_with_workers import LIMIT_S

START = np.float32([1, 2, 3])
GRADIENTS = np.random.default_rng(4).normal(size=(12, 3)).astype("float32")


@pytest.fixture
def cluster() -> Iterator[LastingCluster]:
    made = LastingCluster()
    yield made
    made.end()


def trained(
    strategy: RemoteStateStrategy, make: Callable[[], Any]
) -> tuple[Any, Any, Callable[[np.ndarray], Any]]:
    """A variable, its optimizer, and what makes a step with a gradient."""
    with strategy.scope():
        variable = sg.Variable(START)
        optimizer = make()
        optimizer.build([variable])

    def step(gradient: Any) -> Any:
        before = variable.value
        optimizer.apply([gradient], [variable])
        return before

    return variable, optimizer, lambda gradient: strategy.run(step, args=(gradient,))


def of_keras(make: Callable[[], Any], start: np.ndarray, gradients: Sequence[Any]) -> np.ndarray:
    variable, optimizer = keras.Variable(start), make()
    for gradient in gradients:
        optimizer.apply([gradient], [variable])
    return np.asarray(variable.value)


def test_nothing_is_sent_between_synchronizations(cluster, monkeypatch) -> None:
    method = sg.local_updates.DiLoCo(period=4)
    with independent(cluster, 0, mode_of(method, 2)) as strategy:
        variable, _, step = trained(strategy, lambda: keras.optimizers.Adam(0.1))
        step(GRADIENTS[0])  # fetches the variable
        with counting_messages(monkeypatch) as kinds:
            step(GRADIENTS[1])
            step(GRADIENTS[2])
            assert kinds == []
            np.testing.assert_array_equal(variable.value, START)  # the global model
            kinds.clear()
            step(GRADIENTS[3])
            assert kinds == ["push"]
            kinds.clear()
            step(GRADIENTS[4])
            assert kinds == ["scalars", "pull"]
        assert not np.array_equal(variable.value, START)


def test_step_reads_the_weights_of_its_worker(cluster) -> None:
    def make() -> Any:
        return keras.optimizers.SGD(1.0)

    with independent(cluster, 0, mode_of(sg.local_updates.LocalSGD(period=3), 2)) as strategy:
        variable, optimizer, step = trained(strategy, make)
        seen = [np.asarray(step(gradient)) for gradient in GRADIENTS[:4]]
        np.testing.assert_allclose(seen[1], START - GRADIENTS[0], rtol=1e-6)
        np.testing.assert_allclose(seen[2], START - GRADIENTS[:2].sum(0), rtol=1e-5)
        # Two workers: half of the change of one, with which the next round begins.
        halfway = START - GRADIENTS[:3].sum(0) / 2
        np.testing.assert_allclose(variable.value, halfway, rtol=1e-5)
        np.testing.assert_allclose(seen[3], halfway, rtol=1e-5)
        assert int(optimizer.iterations) == 3


def test_asynchronous_rounds_are_those_of_the_delayed_nesterov_update(cluster) -> None:
    def make() -> Any:
        return keras.optimizers.Adam(0.1)

    method = sg.local_updates.DiLoCo(period=2, outer_learning_rate=0.5, outer_momentum=0.8)
    mode = mode_of(method, 2)
    with independent(cluster, 0, mode) as first, independent(cluster, 1, mode) as second:
        variable, _, one = trained(first, make)
        _, _, two = trained(second, make)
        for number in (0, 1):
            one(GRADIENTS[number])
            two(GRADIENTS[2 + number])
        slow = of_keras(make, START, GRADIENTS[:2]), of_keras(make, START, GRADIENTS[2:4])
        mean = (slow[0] + slow[1]) / 2 - START
        momentum = mean
        expected = START + 0.5 * (0.8 * momentum + mean)  # a step of Nesterov's momentum
        np.testing.assert_allclose(variable.value, expected, rtol=1e-5)
        # The second worker begins with these values, and the first sends its change meanwhile.
        two(GRADIENTS[4])
        one(GRADIENTS[5])
        before = np.asarray(variable.value)
        one(GRADIENTS[6])
        gain = np.asarray(variable.value) - before
        assert np.abs(gain).max() > 0  # without momentum: the change of one of two workers
        two(GRADIENTS[7])
        changed = np.asarray(variable.value) - before
        state = first.placement.remote.variables.client.pull(
            [f"{variable.place.name}:outer_adam.outer_momentum"]
        )
        (new,) = state.values()
        both = (changed / 0.5 - 0.8 * new) * 2  # the sum of both changes
        np.testing.assert_allclose(new, 0.8 * momentum + both / 2, rtol=1e-4, atol=1e-6)


def test_synchronous_worker_that_is_late_begins_with_the_same_count(cluster) -> None:
    def make() -> Any:
        return keras.optimizers.Adam(0.1)

    mode = mode_of(sg.local_updates.LocalSGD(period=2), 2, synchronous=True)
    with (
        independent(cluster, 0, mode) as first,
        independent(cluster, 1, mode) as second,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        variable, optimizer, one = trained(first, make)
        _, _, two = trained(second, make)
        early = [pool.submit(one, gradient) for gradient in GRADIENTS[:4]]
        for gradient in GRADIENTS[4:6]:
            two(gradient)
        client = second.placement.remote.variables.client
        end_s = time.monotonic() + LIMIT_S
        while sum(state["num_waiting"] for state in client.describe().values()) != 1:
            assert time.monotonic() < end_s
        assert int(optimizer.iterations) == 2  # though the first one has sent its count of 4
        for gradient in GRADIENTS[6:8]:
            two(gradient)
        for done in early:
            done.result(LIMIT_S)
        alone = [keras.Variable(START), keras.Variable(START)]
        optimizers = [make(), make()]
        for number in range(4):
            for place in range(2):
                optimizers[place].apply([GRADIENTS[4 * place + number]], [alone[place]])
            if number % 2:
                mean = np.mean([np.asarray(one.value) for one in alone], 0)
                for own in alone:
                    own.assign(mean)
        np.testing.assert_allclose(variable.value, alone[0].value, rtol=1e-5)


def test_worker_that_died_loses_its_round_and_begins_with_the_global_model(cluster) -> None:
    def make() -> Any:
        return keras.optimizers.SGD(0.1, momentum=0.9)

    mode = mode_of(sg.local_updates.LocalSGD(period=3), 1)
    with independent(cluster, 0, mode) as strategy:
        variable, optimizer, step = trained(strategy, make)
        for gradient in GRADIENTS[:3]:
            step(gradient)
        local: Any = strategy.placement.remote.local
        local.end_round(sends_state=True)
        for gradient in GRADIENTS[3:5]:
            step(gradient)  # never sent
        name = variable.place.name
        del optimizer
    with independent(cluster, 0, mode) as strategy:
        variable, optimizer, step = trained(strategy, make)
        assert variable.place.name == name
        kept = [*GRADIENTS[:3], *GRADIENTS[6:9]]
        np.testing.assert_allclose(variable.value, of_keras(make, START, kept[:3]), rtol=1e-5)
        for gradient in kept[3:]:
            step(gradient)
        # The momentum is that of the last state that was sent.
        np.testing.assert_allclose(variable.value, of_keras(make, START, kept), rtol=1e-5)
        assert int(optimizer.iterations) == 6


@pytest.mark.slow
def test_server_that_restarts_gets_the_rules_again(tmp_path) -> None:
    cluster: Any = OneThatDies(tmp_path)
    mode = mode_of(sg.local_updates.DiLoCo(period=2), 1)
    with independent(cluster, 0, mode) as strategy:
        with strategy.scope():
            model = dense(keras.optimizers.Adam(0.01))
        model.fit(X[:16], Y[:16], **FIT)
        strategy.placement.remote.variables.secure()
        before = weights(model)
        cluster.server.restart()
        model.fit(X[:16], Y[:16], **FIT)
        for one, other in zip(weights(model), before, strict=True):
            assert np.isfinite(one).all()
            assert not np.array_equal(one, other)
        # Batch normalization's averages, too: their rule was sent by this worker.
        assert int(model.optimizer.iterations) == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Parameter servers restarted:RuntimeWarning")
def test_server_that_restarts_at_once_knows_the_rule_of_averages(tmp_path) -> None:
    cluster: Any = OneThatDies(tmp_path)
    with independent(cluster, 0, mode_of(sg.local_updates.LocalSGD(period=1), 1)) as strategy:
        with strategy.scope():
            model = dense(keras.optimizers.SGD(0.1))
        model.train_on_batch(X[:8], Y[:8])
        cluster.server.restart()
        model.train_on_batch(X[8:16], Y[8:16])
        assert strategy.placement.remote.variables.client.describe()[0]["version"] == 1


def test_counts_are_added_up_and_written_values_are_kept(cluster) -> None:
    with independent(cluster, 0, mode_of(sg.local_updates.LocalSGD(period=2), 2)) as strategy:
        with strategy.scope():
            variable, count = sg.Variable(START), sg.Variable(np.int32([0, 5]), trainable=False)
            last = sg.Variable(np.zeros(3, "float32"), trainable=False)
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([variable])

        def step(gradient: Any) -> None:
            count.assign_add(np.int32([1, 1]))
            last.assign(gradient)
            optimizer.apply([gradient], [variable])

        strategy.run(step, args=(GRADIENTS[0],))
        np.testing.assert_array_equal(count.value, [0, 5])
        strategy.run(step, args=(GRADIENTS[1],))
        np.testing.assert_array_equal(count.value, [2, 7])
        np.testing.assert_array_equal(last.value, GRADIENTS[1])


def test_larger_count_of_steps_on_the_servers_is_taken_over(cluster) -> None:
    def make() -> Any:
        return keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([9], [1, 0]))

    mode = mode_of(sg.local_updates.LocalSGD(period=2), 1)
    with contextlib.ExitStack() as stack:
        strategy = stack.enter_context(independent(cluster, 0, mode))
        variable, optimizer, step = trained(strategy, make)
        for gradient in GRADIENTS[:2]:
            step(gradient)
        after = np.asarray(variable.value)
        np.testing.assert_allclose(after, START - GRADIENTS[:2].sum(0), rtol=1e-5)
        optimizer.iterations.assign(100)
        for gradient in GRADIENTS[2:4]:
            step(gradient)
        np.testing.assert_array_equal(variable.value, after)  # the rate is 0 by then
        assert int(optimizer.iterations) == 102


def test_optimizers_in_turn_are_synchronized_together(cluster) -> None:
    def make() -> Any:
        return keras.optimizers.Nadam(0.1)

    with independent(cluster, 0, mode_of(sg.local_updates.LocalSGD(period=4), 1)) as strategy:
        one, _, first = trained(strategy, make)
        two, optimizer, second = trained(strategy, make)
        for place in range(0, 8, 2):
            first(GRADIENTS[place])
            second(GRADIENTS[place + 1])
        np.testing.assert_allclose(one.value, of_keras(make, START, GRADIENTS[:8:2]), rtol=1e-5)
        np.testing.assert_allclose(two.value, of_keras(make, START, GRADIENTS[1:8:2]), rtol=1e-5)
        local: Any = strategy.placement.remote.local
        local.end_round(sends_state=True)
        alone = make()
        alone.build([variable := keras.Variable(START)])
        for gradient in GRADIENTS[1:8:2]:
            alone.apply([gradient], [variable])
        for there, here in zip(optimizer.variables, alone.variables, strict=True):
            np.testing.assert_allclose(there.value, here.value, rtol=1e-5)


# Steps on a worker's own weights: which steps use them, and which values stay on servers.

METHOD = sg.local_updates.LocalSGD(period=4)


@pytest.fixture
def strategy_of_local_steps() -> Iterator[Any]:
    cluster = LastingCluster(num_servers=1)
    with independent(cluster, 0, mode_of(METHOD, 1)) as made:
        yield made
    cluster.end()


def test_steps_that_do_not_train_use_the_global_model(strategy_of_local_steps) -> None:
    with strategy_of_local_steps.scope():
        variable = sg.Variable(np.float32([2.0]))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    def train() -> Any:
        before = variable.value
        optimizer.apply([jnp.ones(1)], [variable])
        return before

    def read() -> Any:
        return variable.value * 1

    seen = [
        float(strategy_of_local_steps.run(step)[0])
        for step in (train, train, read, train, train, read)
    ]
    assert seen == [2, 1, 2, 0, -1, -2]


@pytest.mark.slow
def test_only_rows_of_tables_are_sent_in_a_step(strategy_of_local_steps, monkeypatch) -> None:
    with strategy_of_local_steps.scope():
        model = table(keras.optimizers.SGD(0.1))
    model.train_on_batch(IDS[:8], Y[:8])
    with counting_messages(monkeypatch) as kinds:
        model.train_on_batch(IDS[8:16], Y[8:16])
    assert kinds == ["pull_rows", "push"]
    client = strategy_of_local_steps.placement.remote.variables.client
    rows = client.pull_rows(model.get_layer("table").embeddings.place.name, IDS[8:16])
    alone = table(keras.optimizers.SGD(0.1))
    alone.train_on_batch(IDS[:8], Y[:8])
    alone.train_on_batch(IDS[8:16], Y[8:16])
    expected = np.asarray(alone.get_layer("table").embeddings.value)[IDS[8:16]]
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_single_batches_train_in_rounds(strategy_of_local_steps, monkeypatch) -> None:
    alone = dense(keras.optimizers.Adam(0.01))
    with strategy_of_local_steps.scope():
        model = dense(keras.optimizers.Adam(0.01))
    losses: list[Any] = []
    for number in range(4):
        batch = slice(8 * number, 8 * number + 8)
        losses.append(model.train_on_batch(X[batch], Y[batch], return_dict=True)["loss"])
        known = alone.train_on_batch(X[batch], Y[batch], return_dict=True)["loss"]
        np.testing.assert_allclose(losses[-1], known, rtol=1e-5)
    np.testing.assert_allclose(
        model.evaluate(X, Y, verbose=0), alone.evaluate(X, Y, verbose=0), rtol=1e-4
    )


def test_changes_are_described_as_sent_once_in_a_period(strategy_of_local_steps) -> None:
    with strategy_of_local_steps.scope():
        model = table(keras.optimizers.SGD(0.1))
    found = transfers_of(
        model.variables,
        strategy_of_local_steps.placement,
        strategy_of_local_steps.topology,
        has_slots=True,
        local_updates=METHOD,
    )
    size = sum(np.asarray(one.value).nbytes for one in model.variables[1:])
    assert {(one.kind, one.arrays): (one.sent_bytes, one.every_steps) for one in found} == {
        ("pull from servers", "rows looked up"): (None, 1),
        ("push to servers", "gradients of rows"): (None, 1),
        ("pull from servers", "values"): (0, 4),
        ("push to servers", "changes of weights"): (size // 4, 4),
    }
