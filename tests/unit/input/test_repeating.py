"""Distributed datasets read more than once: repeated, or made from generators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse

import stratagem as sg
from stratagem.input.sources.source import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from tests.parity.comparison import mirrored, with_known_weights


def _batches() -> Iterator[Any]:
    for start in (0, 2, 4):
        yield np.arange(start, min(start + 2, 5))


def _of_function(strategy: Any, *, per_replica: bool) -> Any:
    modes = sg.InputReplicationMode
    mode = modes.PER_REPLICA if per_replica else modes.PER_WORKER
    return strategy.distribute_datasets_from_function(
        lambda context: list(_batches()), sg.InputOptions(replication_mode=mode)
    )


_KINDS = {
    "list": lambda strategy: strategy.distribute_dataset(list(_batches())),
    "generator function": lambda strategy: strategy.distribute_dataset(
        sg.input.Dataset.from_generator(_batches)
    ),
    "function": lambda strategy: _of_function(strategy, per_replica=False),
    "function of a replica": lambda strategy: _of_function(strategy, per_replica=True),
}


def _seen(strategy: Any, batches: Any) -> list[Any]:
    return [[np.asarray(part).tolist() for part in strategy.local_results(b)] for b in batches]


@pytest.mark.parametrize("kind", sorted(_KINDS))
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_repeated_batches_are_those_of_epoch_after_epoch(kind: str, num_replicas: int) -> None:
    strategy = mirrored(num_replicas)
    dataset = _KINDS[kind](strategy)
    once = _seen(strategy, dataset)
    assert _seen(strategy, dataset.repeat(2)) == once * 2
    assert dataset.repeat(2).repeat(3).cardinality in (len(once) * 6, UNKNOWN_CARDINALITY)
    assert dataset.repeat().cardinality == INFINITE_CARDINALITY
    endless = iter(dataset.repeat())
    assert _seen(strategy, [next(endless) for _ in range(3 * len(once) + 1)]) == [
        *once * 3,
        once[0],
    ]
    endless.close()


@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_repeated_dataset_resumes_from_any_step(kind: str) -> None:
    strategy = mirrored(2)
    dataset = _KINDS[kind](strategy).repeat(2)
    whole = _seen(strategy, dataset)
    for num_steps in range(len(whole) + 1):
        first = iter(dataset)
        before = _seen(strategy, [next(first) for _ in range(num_steps)])
        state = first.get_state()
        first.close()
        again = iter(dataset)
        again.set_state(state)
        assert before + _seen(strategy, again) == whole


class _Once:
    """Gives the same iterator again."""

    def __init__(self) -> None:
        self.batches = _batches()

    def __iter__(self) -> Iterator[Any]:
        return self.batches


def test_what_can_be_read_once_goes_on_and_is_then_an_error() -> None:
    for once in (_batches(), _Once()):
        dataset = sg.input.Dataset(once)
        assert next(iter(dataset)).tolist() == [0, 1]
        assert [batch.tolist() for batch in dataset] == [[2, 3], [4]]
        for _ in range(2):
            with pytest.raises(ValueError, match="ended after 3 batches"):
                list(dataset)
    assert list(sg.input.Dataset(iter([]))) == []


def _model(strategy: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def _pairs() -> Iterator[Any]:
    for i in range(5):
        yield np.full((2, 1), i, "float32"), np.full((2, 1), i, "float32")


def _steps(model: keras.Model, data: Any, **kwargs: Any) -> list[int]:
    counts: list[int] = []

    class Count(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            counts.append(0)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            counts[-1] += 1

    model.fit(data, verbose=0, callbacks=[Count()], **kwargs)
    assert sum(counts) == int(model.optimizer.iterations)
    return counts


@pytest.mark.parametrize("kind", ["of a source", "distributed", "of no known length"])
def test_fit_takes_all_its_steps_of_a_repeated_dataset(kind: str) -> None:
    strategy = mirrored(2)
    data = {
        "of a source": lambda: sg.input.Dataset(list(_pairs())).repeat(),
        "distributed": lambda: strategy.distribute_dataset(list(_pairs())).repeat(),
        "of no known length": lambda: sg.input.Dataset.from_generator(_pairs).repeat(),
    }[kind]()
    # As TensorFlow 2.21 with tf.data under MirroredStrategy.
    assert _steps(_model(strategy), data, steps_per_epoch=3, epochs=3) == [3, 3, 3]


def test_fit_of_a_finite_dataset_takes_the_steps_of_tensorflow_and_warns() -> None:
    strategy = mirrored(2)
    data = strategy.distribute_dataset(list(_pairs()))
    with pytest.warns(UserWarning, match=r"`.repeat\(\)` function"):
        steps = _steps(_model(strategy), data, steps_per_epoch=2, epochs=4)
    assert steps == [2, 2, 1, 2]  # TensorFlow 2.21, tf.data under MirroredStrategy


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")  # Keras before 3.16
def test_fit_of_a_generator_does_not_train_empty_epochs() -> None:
    strategy = mirrored(2)
    model = _model(strategy)
    with pytest.raises(ValueError, match="ended after 5 batches"):
        model.fit(strategy.distribute_dataset(_pairs()), epochs=2, verbose=0)
    endless = strategy.distribute_dataset(list(_pairs())).repeat()
    with pytest.raises(ValueError, match="DistributedDataset that is infinite, but no number"):
        _model(strategy).fit(endless, verbose=0)
    assert int(model.optimizer.iterations) == 5


# Rows of 1, 0, 3, 2 and 1 entries.
_X = np.array(
    [[0, 2, 0, 0], [0, 0, 0, 0], [1, 3, 0, -1], [0, 0, 4, 5], [6, 0, 0, 0]], dtype="float32"
)
_Y = np.arange(10, dtype="float32").reshape(5, 2)
_WEIGHTS = np.arange(8, dtype="float32").reshape(4, 2)

_KINDS_OF_SPARSE_ROWS = {
    "csr": scipy.sparse.csr_matrix,
    "array": scipy.sparse.coo_array,
    "BCOO": sparse.BCOO.fromdense,
}


def _model_of_sparse_rows(*, run_eagerly: bool = False, is_sparse: bool = False) -> Any:
    inputs = keras.Input((4,), sparse=is_sparse)
    model = with_known_weights(keras.Model(inputs, keras.layers.Dense(2)(inputs)))
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse", run_eagerly=run_eagerly)
    return model


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Plain Keras with dense arrays."""
    model = _model_of_sparse_rows()
    return _trained(model, _X)


def _trained(model: Any, x: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"batch_size": 3, "verbose": 0}
    result = {
        "predict": model.predict(x, **arguments),
        "evaluate": model.evaluate(x, _Y, **arguments),
        "fit": model.fit(x, _Y, shuffle=False, **arguments).history["loss"],
    }
    return result | {"kernel": np.asarray(model.weights[0].value)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("csr", {}),
        ("csr", {"run_eagerly": True}),
        ("array", {"is_sparse": True}),
        ("BCOO", {"is_sparse": True}),
    ],
    ids=str,
)
def test_model_sees_the_rows_of_sparse_features(kind, options, expected) -> None:
    with mirrored(2).scope():
        model = _model_of_sparse_rows(**options)
    measured = _trained(model, _KINDS_OF_SPARSE_ROWS[kind](_X))
    for name, value in expected.items():
        np.testing.assert_allclose(measured[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_replica_function_gets_a_bcoo_array_of_its_rows(num_replicas) -> None:
    strategy = mirrored(num_replicas)
    rows = scipy.sparse.csr_matrix(_X)
    dataset = strategy.distribute_dataset([(rows[:3], _Y[:3]), (rows[3:], _Y[3:])])

    def step(x: Any, y: Any) -> Any:
        assert isinstance(x, sparse.BCOO)
        assert x.shape[0] == y.shape[0]
        return x @ _WEIGHTS

    results = [strategy.gather(strategy.run(step, args=batch), axis=0) for batch in dataset]
    np.testing.assert_allclose(np.concatenate(results), _X @ _WEIGHTS)


def test_sparse_gradients_are_applied() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        variable = sg.Variable(np.zeros((3, 2), "float32"))
        optimizer = keras.optimizers.SGD(1.0)

    def step() -> None:
        gradient = sparse.BCOO.fromdense(jax.numpy.ones((3, 2)).at[1].set(0), nse=4)
        optimizer.apply([gradient], [variable])

    strategy.run(step)
    np.testing.assert_allclose(variable.value, [[-2, -2], [0, 0], [-2, -2]])


def _parts(batch: Any) -> list[list[Any]]:
    return [np.asarray(part).tolist() for part in batch.components]


# sg.input.Dataset: batches of any source, distributed in a strategy's scope.


def test_a_dataset_is_distributed_in_scope_and_plain_outside() -> None:
    dataset = sg.input.Dataset({"x": np.arange(5)}, batch_size=3)
    assert [batch["x"].tolist() for batch in dataset] == [[0, 1, 2], [3, 4]]
    whole = sg.input.Dataset(np.arange(5), batch_size=3, drop_remainder=True)
    assert ([batch.tolist() for batch in whole], len(whole)) == ([[0, 1, 2]], 1)
    plain = sg.input.Dataset([np.zeros(2), np.ones(1)])
    assert len(plain) == plain.cardinality == 2
    assert [batch.tolist() for batch in plain] == [[0, 0], [1]]
    assert plain.element_spec == sg.input.ArraySpec((None,), "float64")
    for strategy in (mirrored(2), mirrored(3)):
        size = -(-3 // strategy.num_replicas_in_sync)
        with strategy.scope():
            first, _ = dataset
        assert _parts(first["x"])[0] == list(range(size))
        assert len(_parts(first["x"])) == strategy.num_replicas_in_sync


def test_epochs_in_scope_follow_one_another() -> None:
    dataset = sg.input.Dataset(np.arange(8), batch_size=8, shuffle=True)
    with mirrored(2).scope():
        orders = {tuple(itertools.chain(*_parts(batch))) for _ in range(3) for batch in dataset}
    assert len(orders) == 3
    plain = sg.input.Dataset(np.arange(8), batch_size=8, shuffle=True)
    assert {tuple(batch.tolist()) for _ in range(3) for batch in plain} == orders


def test_examples_with_numbers_are_stacked() -> None:
    class Examples:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": np.full(2, index), "y": index}

    first, second = sg.input.Dataset(Examples(), batch_size=3)
    np.testing.assert_array_equal(first["x"], [[0, 0], [1, 1], [2, 2]])
    np.testing.assert_array_equal(second["y"], [3, 4])
    shuffled = sg.input.Dataset(Examples(), batch_size=5, shuffle=True)
    (batch,) = shuffled
    assert sorted(batch["y"].tolist()) == list(range(5))


_UNBATCHED = "Unbatched arrays were passed as a dataset"
_UNEQUAL = "A dataset cannot be made from arrays of shapes"


@pytest.mark.parametrize(
    ("given", "options", "error", "words"),
    [
        ([np.zeros(2)], {"shuffle": True}, ValueError, "were passed without batch_size"),
        ([np.zeros(2)], {"drop_remainder": True}, ValueError, "were passed without batch_size"),
        (np.zeros((4, 2)), {}, ValueError, _UNBATCHED),
        ((np.zeros(4), np.zeros(4)), {}, ValueError, _UNBATCHED),
        ({"x": [1, 2]}, {}, ValueError, _UNBATCHED),
        ((np.zeros(4), np.zeros(5)), {"batch_size": 2}, ValueError, _UNEQUAL),
        ((np.float32(1), np.float32(2)), {"batch_size": 2}, ValueError, _UNEQUAL),
        (np.zeros(4), {"batch_size": 0}, ValueError, r"=0.\nExpected an integer of at least 1"),
        (np.zeros(4), {"batch_size": -1}, ValueError, r"=-1.\nExpected an integer of at least 1"),
        (iter([1, 2]), {"batch_size": 2}, TypeError, "batch_size=2 .* object of type list_iter"),
        (7, {}, TypeError, "7 of type int was passed as a dataset"),
        (_batches, {}, TypeError, r"Dataset\.from_generator\(function\)"),
    ],
)
def test_what_makes_no_dataset_is_refused(
    given: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        sg.input.Dataset(given, **options)
