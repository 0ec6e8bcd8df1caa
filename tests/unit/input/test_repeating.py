"""Distributed datasets read more than once: repeated, or made from generators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.input.sources.source import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY


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
    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
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
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
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


def test_a_generator_read_again_is_an_error_and_not_empty() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.distribute_dataset(_batches())
    assert len(list(dataset)) == 3
    for _ in range(2):
        with pytest.raises(ValueError, match="ended after 3 batches"):
            next(iter(dataset))


def test_a_plain_dataset_of_a_generator_read_again_is_an_error() -> None:
    dataset = sg.input.Dataset(_batches())
    assert len(list(dataset)) == 3
    with pytest.raises(ValueError, match="ended after 3 batches"):
        list(dataset)


def test_an_object_that_gives_the_same_iterator_again_is_an_error() -> None:
    class Once:
        def __init__(self) -> None:
            self.batches = _batches()

        def __iter__(self) -> Iterator[Any]:
            return self.batches

    dataset = sg.input.Dataset(Once())
    assert len(list(dataset)) == 3
    with pytest.raises(ValueError, match="of type Once, which ended after 3 batches"):
        list(dataset)


def test_generator_with_more_batches_continues() -> None:
    dataset = sg.input.Dataset(_batches())
    first = next(iter(dataset))
    assert first.tolist() == [0, 1]
    assert [batch.tolist() for batch in dataset] == [[2, 3], [4]]


def test_an_empty_generator_is_no_error() -> None:
    assert list(sg.input.Dataset(iter([]))) == []


def test_function_is_rejected_with_the_way_to_wrap_it() -> None:
    with pytest.raises(TypeError, match=r"Dataset\.from_generator\(function\)"):
        sg.input.Dataset(_batches)
    with pytest.raises(TypeError, match="pass the function, not its result"):
        sg.input.Dataset.from_generator(_batches())  # pyright: ignore[reportArgumentType]


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
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    data = {
        "of a source": lambda: sg.input.Dataset(list(_pairs())).repeat(),
        "distributed": lambda: strategy.distribute_dataset(list(_pairs())).repeat(),
        "of no known length": lambda: sg.input.Dataset.from_generator(_pairs).repeat(),
    }[kind]()
    # As TensorFlow 2.21 with tf.data under MirroredStrategy.
    assert _steps(_model(strategy), data, steps_per_epoch=3, epochs=3) == [3, 3, 3]


def test_fit_of_a_finite_dataset_takes_the_steps_of_tensorflow_and_warns() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    data = strategy.distribute_dataset(list(_pairs()))
    with pytest.warns(UserWarning, match=r"`.repeat\(\)` function"):
        steps = _steps(_model(strategy), data, steps_per_epoch=2, epochs=4)
    assert steps == [2, 2, 1, 2]  # TensorFlow 2.21, tf.data under MirroredStrategy


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")  # Keras before 3.16
def test_fit_of_a_generator_does_not_train_empty_epochs() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model = _model(strategy)
    with pytest.raises(ValueError, match="ended after 5 batches"):
        model.fit(strategy.distribute_dataset(_pairs()), epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 5


def test_fit_of_a_dataset_without_end_needs_a_number_of_steps() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    data = strategy.distribute_dataset(list(_pairs())).repeat()
    with pytest.raises(ValueError, match="DistributedDataset that is infinite, but no number"):
        _model(strategy).fit(data, verbose=0)
