"""Datasets of TensorFlow, PyTorch and Hugging Face: `make test-external NAME=peers`."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.input.sources.adapters import as_source, batched_source
from stratagem.input.sources.source import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    RepeatedSource,
    Source,
    repeated_cardinality,
)

# Loaded once, before any test: TensorFlow sets environment variables.
_LIBRARIES = {
    name: importlib.import_module(name) if importlib.util.find_spec(name) else None
    for name in ("tensorflow", "torch", "torchdata", "datasets")
}


class Batches(keras.utils.PyDataset):
    """Batches of two, and calls at the begin and the end of each epoch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return np.arange(2 * index, 2 * index + 2)

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")


def values_of(batches: Any) -> list[Any]:
    return [
        [leaf.tolist() for leaf in (batch if isinstance(batch, tuple) else (batch,))]
        for batch in batches
    ]


def _library(name: str, called: str) -> Any:
    if _LIBRARIES[name] is None:
        pytest.skip(f"{called} is not installed: `make test-external NAME=peers` has it")
    return _LIBRARIES[name]


def _rows(batches: Any) -> list[Any]:
    return [jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), batch) for batch in batches]


def _check_going_on(make: Any) -> None:
    """Compares a restored reader with an uninterrupted one."""
    undisturbed = make().open(0)
    state_of_all = undisturbed.state()
    expected = _rows(undisturbed)
    for num_read in (1, len(expected) - 1):
        again = make().open(0)
        again.restore(json.loads(json.dumps(state_of_all)))
        assert _rows(next(again) for _ in range(num_read)) == expected[:num_read]
        state = json.loads(json.dumps(again.state()))
        restored = make().open(0)
        restored.restore(state)
        assert _rows(restored) == expected[num_read:]


def _check_resuming(make: Any) -> None:
    """The same for readers without a state before they are read."""
    expected = _rows(make().open(0))
    reader = make().open(0)
    assert _rows(next(reader) for _ in range(2)) == expected[:2]
    again = make().open(0)
    again.restore(json.loads(json.dumps(reader.state())))
    assert _rows(again) == expected[2:]


class TestTensorFlow:
    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        self.tf = _library("tensorflow", "TensorFlow")

    def test_batches_are_numpy(self) -> None:
        data = {"x": np.arange(5), "y": np.arange(5, dtype="uint8")}
        source = as_source(self.tf.data.Dataset.from_tensor_slices(data).batch(2))
        batches = list(source.open(0))
        assert [batch["x"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
        assert all(isinstance(batch["y"], np.ndarray) for batch in batches)
        assert batches[0]["y"].dtype == np.uint8
        assert source.cardinality == 3
        assert source.element_spec()["y"] == sg.input.ArraySpec((None,), "uint8")

    def test_cardinality_may_be_infinite_or_unknown(self) -> None:
        dataset = self.tf.data.Dataset.range(4).batch(2)
        assert as_source(dataset.repeat()).cardinality == INFINITE_CARDINALITY
        assert as_source(dataset.filter(lambda _: True)).cardinality == UNKNOWN_CARDINALITY

    def test_own_policy_of_a_dataset_is_followed(self) -> None:
        dataset = self.tf.data.Dataset.range(8).batch(4)
        policies = self.tf.data.experimental.AutoShardPolicy
        for policy in sg.AutoShardPolicy:
            options = self.tf.data.Options()
            options.experimental_distribute.auto_shard_policy = getattr(policies, policy.name)
            assert as_source(dataset.with_options(options)).auto_shard_policy is policy

    @pytest.mark.parametrize("seed", [None, 3], ids=["no seed", "seed"])
    def test_shuffled_dataset_goes_on(self, seed: int | None) -> None:
        _check_going_on(
            lambda: as_source(self.tf.data.Dataset.range(40).shuffle(20, seed=seed).batch(4))
        )


class TestTorch:
    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        self.torch = _library("torch", "PyTorch")

    def _loader(self, **options: Any) -> Any:
        torch = self.torch
        dataset = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10.0))
        return torch.utils.data.DataLoader(dataset, batch_size=3, **options)

    def test_batches_are_numpy(self) -> None:
        source = as_source(self._loader())
        assert source.cardinality == 4
        first = next(source.open(0))
        assert [type(leaf) for leaf in first] == [np.ndarray, np.ndarray]
        assert first[0].tolist() == [0, 1, 2]

    def test_loader_in_order_goes_on(self) -> None:
        _check_going_on(lambda: as_source(self._loader()))

    def test_shuffled_loader_with_a_generator_goes_on(self) -> None:
        def make() -> Any:
            generator = self.torch.Generator()
            generator.manual_seed(np.random.default_rng().integers(2**31).item())
            return as_source(self._loader(shuffle=True, generator=generator))

        _check_going_on(make)

    def test_shuffled_loader_without_a_generator_says_what_to_do(self) -> None:
        reader = as_source(self._loader(shuffle=True)).open(0)
        with pytest.raises(NotImplementedError, match="Fix: give it a generator"):
            reader.state()

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
    def test_stateful_loader_goes_on(self) -> None:
        _library("torchdata", "torchdata")
        loaders = importlib.import_module("torchdata.stateful_dataloader")

        def make() -> Any:
            return as_source(loaders.StatefulDataLoader(list(range(12)), batch_size=3))

        _check_resuming(make)


class TestHuggingFace:
    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        self.datasets = _library("datasets", "Hugging Face datasets")

    def test_rows_are_batched_and_shuffled(self) -> None:
        dataset = self.datasets.Dataset.from_dict({"x": list(range(7)), "y": [[0.5] * 2] * 7})
        source = batched_source(dataset, batch_size=3, shuffle=True, seed=0, drop_remainder=False)
        batches = list(source.open(0))
        assert sorted(n for batch in batches for n in batch["x"].tolist()) == list(range(7))
        assert [batch["y"].shape for batch in batches] == [(3, 2), (3, 2), (1, 2)]

    def test_dataset_of_batches_goes_on(self) -> None:
        _check_going_on(
            lambda: as_source(self.datasets.Dataset.from_dict({"x": list(range(7))}).batch(2))
        )

    def test_streamed_dataset_goes_on(self) -> None:
        dataset = self.datasets.Dataset.from_dict({"x": list(range(12))})

        def make() -> Any:
            return as_source(dataset.to_iterable_dataset().batch(2))

        _check_resuming(make)
        assert [batch["x"] for batch in _rows(make().open(0))[:2]] == [[0, 1], [2, 3]]

    def test_streamed_dataset_is_shared_by_its_files(self) -> None:
        examples = self.datasets.Dataset.from_dict({"x": list(range(12))})
        source = as_source(examples.to_iterable_dataset(num_shards=4).batch(2))
        assert source.num_files == 4
        parts = [
            [row for batch in source.shard(2, i).open(0) for row in batch["x"]] for i in (0, 1)
        ]
        assert sorted(parts[0] + parts[1]) == list(range(12))
        assert len(parts[0]) == len(parts[1]) == 6

    def test_examples_may_be_every_nth(self) -> None:
        examples = self.datasets.Dataset.from_dict({"x": list(range(10))})
        dataset = sg.input.Dataset(examples, batch_size=4).shard(3, 1)
        assert [batch["x"].tolist() for batch in dataset] == [[1, 4, 7]]


# Each source reads its batches in order, epoch by epoch, and can be resumed.


class _Resumable:
    """An iterator with the state methods of other libraries."""

    def __init__(self, names: tuple[str, str]) -> None:
        self._next = 0
        setattr(self, names[0], lambda: {"next": self._next})
        setattr(self, names[1], self._go_to)

    def _go_to(self, state: dict[str, int]) -> None:
        self._next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next == 80:
            raise StopIteration
        self._next += 1
        return np.full(2, self._next)


class _LoaderWithState:
    """An iterable with its own state, like torchdata's StatefulDataLoader and Hugging Face."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        while self._next < 6:
            self._next += 1
            yield np.full(2, self._next)
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def _grain(*, shuffle: bool) -> Source:
    dataset = grain.MapDataset.source(np.arange(10))
    return as_source((dataset.shuffle(3) if shuffle else dataset).batch(3))


_OPTIONS = {"batch_size": 3, "seed": 1, "drop_remainder": False}
_RESUMABLE: dict[str, Callable[[], Source]] = {
    "arrays": lambda: batched_source((np.arange(10), np.ones(10)), shuffle=False, **_OPTIONS),
    "arrays, shuffled": lambda: batched_source(np.arange(10), shuffle=True, **_OPTIONS),
    "list": lambda: as_source([np.arange(3), np.arange(2), np.arange(1)]),
    "PyDataset": lambda: as_source(Batches()),
    "PyDataset, threads": lambda: as_source(Batches(workers=2, max_queue_size=3)),
    "grain.MapDataset": lambda: _grain(shuffle=False),
    "grain.MapDataset, shuffled": lambda: _grain(shuffle=True),
    "grain.MapDataset, batched here": lambda: batched_source(
        grain.MapDataset.source(np.arange(10)), shuffle=True, **_OPTIONS
    ),
    "grain.IterDataset": lambda: as_source(
        grain.MapDataset.source(np.arange(200)).shuffle(1).to_iter_dataset().batch(4)
    ),
    "get_state": lambda: as_source(_Resumable(("get_state", "set_state"))),
    "state_dict": lambda: as_source(_Resumable(("state_dict", "load_state_dict"))),
    "state_dict of the iterable": lambda: as_source(_LoaderWithState()),
}


@pytest.mark.parametrize("name", _RESUMABLE)
def test_reader_resumes_from_another_one(name: str) -> None:
    expected = values_of(_RESUMABLE[name]().open(2))
    assert len(expected) >= 3
    known = name.startswith(("arrays", "list", "PyDataset", "grain.MapDataset"))
    cardinality = len(expected) if known else UNKNOWN_CARDINALITY
    assert _RESUMABLE[name]().cardinality == cardinality
    for num_read in (0, 1, len(expected) - 1, len(expected)):
        first = _RESUMABLE[name]().open(2)
        assert values_of(next(first) for _ in range(num_read)) == expected[:num_read]
        state = json.loads(json.dumps(first.state()))
        first.close()
        again = _RESUMABLE[name]().open(2)
        again.restore(state)
        assert values_of(again) == expected[num_read:]
        again.close()


@pytest.mark.parametrize(
    "name", ["arrays, shuffled", "grain.MapDataset, shuffled", "grain.MapDataset, batched here"]
)
def test_each_epoch_has_an_order_of_its_own(name: str) -> None:
    source = _RESUMABLE[name]()
    orders = [[n for batch in source.open(epoch) for n in batch.tolist()] for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    again = _RESUMABLE[name]()
    assert [n for batch in again.open(1) for n in batch.tolist()] == orders[1]


# Repeated sources.


@pytest.mark.parametrize(
    ("cardinality", "count", "expected"),
    [
        (4, 3, 12),
        (4, 0, 0),
        (0, None, 0),
        (4, None, INFINITE_CARDINALITY),
        (UNKNOWN_CARDINALITY, None, INFINITE_CARDINALITY),
        (UNKNOWN_CARDINALITY, 2, UNKNOWN_CARDINALITY),
        (UNKNOWN_CARDINALITY, 0, 0),
        (INFINITE_CARDINALITY, 2, INFINITE_CARDINALITY),
    ],
)
def test_lengths_are_those_of_tensorflow(cardinality: int, count: Any, expected: int) -> None:
    assert repeated_cardinality(cardinality, count) == expected  # tf.data, RepeatDatasetOp


def test_an_empty_source_without_end_ends_and_a_repetition_of_none_gives_nothing() -> None:
    assert list(RepeatedSource(as_source([]), None).open(0)) == []
    assert list(sg.input.Dataset([np.arange(2)]).repeat(0)) == []
    assert as_source([]).element_spec() is as_source(iter([])).element_spec() is None
    reader = RepeatedSource(as_source(iter([np.zeros(1)])), None).open(0)
    next(reader)
    with pytest.raises(ValueError, match=r"sg\.input\.Dataset\.from_generator\(function\)"):
        next(reader)


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (2.0, TypeError, "an int, or None to repeat forever"),
        (True, TypeError, "an int, or None to repeat forever"),
        (-2, ValueError, "0 or more; None or -1"),
    ],
)
def test_other_counts_are_refused(count: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sg.input.Dataset([np.zeros(1)]).repeat(count)


def test_files_are_shared_before_they_are_repeated() -> None:
    dataset = sg.input.Dataset.from_files(
        [1, 2, 3, 4], lambda files: [np.full(1, file) for file in files]
    ).repeat(2)
    source = dataset.as_source()
    assert source.num_files == 4
    assert [int(batch[0]) for batch in source.shard(2, 1).open(0)] == [2, 4, 2, 4]


# Sources of lists and of Keras PyDatasets, with their notifications, threads and processes.


class _Endless(Batches):
    @property
    def num_batches(self) -> None:
        return None


def test_endless_pydataset_has_no_end() -> None:
    source = as_source(_Endless())
    assert source.cardinality == INFINITE_CARDINALITY
    reader = source.open(0)
    assert [next(reader)[0] for _ in range(6)] == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"workers": 3}, marks=pytest.mark.slow)], ids=["alone", "threads"]
)
def test_pydataset_is_notified_of_each_epoch(options: dict[str, Any]) -> None:
    dataset = Batches(**options)
    source = as_source(dataset)
    for epoch in range(2):
        reader = source.open(epoch)
        assert values_of(reader) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
        assert next(reader, None) is None, "the end is told once"
    assert dataset.calls == ["begin", "end"] * 2


# Sources of generators and of iterables that begin anew.


def test_batches_are_kept_apart_from_a_generator_that_fills_one_array() -> None:
    def batches() -> Iterator[Any]:
        buffer = np.zeros(2)
        for number in range(3):
            buffer[:] = number
            yield buffer

    read = list(as_source(batches()).open(0))
    assert values_of(read) == [[[0, 0]], [[1, 1]], [[2, 2]]]
