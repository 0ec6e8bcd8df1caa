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
from stratagem.input.sources.adapters import RayDataSource, as_source, batched_source
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


def _torch_loader(**options: Any) -> Any:
    torch = _library("torch", "PyTorch")
    dataset = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10.0))
    return torch.utils.data.DataLoader(dataset, batch_size=3, **options)


def _rows(batches: Any) -> list[Any]:
    return [jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), batch) for batch in batches]


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


class TestTorch:
    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        self.torch = _library("torch", "PyTorch")

    def test_batches_are_numpy(self) -> None:
        source = as_source(_torch_loader())
        assert source.cardinality == 4
        first = next(source.open(0))
        assert [type(leaf) for leaf in first] == [np.ndarray, np.ndarray]
        assert first[0].tolist() == [0, 1, 2]

    def test_shuffled_loader_without_a_generator_says_what_to_do(self) -> None:
        reader = as_source(_torch_loader(shuffle=True)).open(0)
        with pytest.raises(NotImplementedError, match="Fix: give it a generator"):
            reader.state()


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


def _of_tensorflow(seed: int | None) -> Any:
    tf = _library("tensorflow", "TensorFlow")
    return tf.data.Dataset.range(40).shuffle(20, seed=seed).batch(4)


def _shuffled_torch_loader() -> Any:
    generator = _library("torch", "PyTorch").Generator()
    generator.manual_seed(np.random.default_rng().integers(2**31).item())
    return _torch_loader(shuffle=True, generator=generator)


def _stateful_torch_loader() -> Any:
    _library("torchdata", "torchdata")
    loaders = importlib.import_module("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(list(range(12)), batch_size=3)


def _of_hugging_face(*, is_streamed: bool) -> Any:
    dataset = _library("datasets", "Hugging Face datasets").Dataset
    rows = dataset.from_dict({"x": list(range(12))})
    return (rows.to_iterable_dataset() if is_streamed else rows).batch(2)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
@pytest.mark.parametrize(
    ("make", "has_state_before"),
    [
        (lambda: _of_tensorflow(None), True),
        (lambda: _of_tensorflow(3), True),
        (_torch_loader, True),
        (_shuffled_torch_loader, True),
        (_stateful_torch_loader, False),
        (lambda: _of_hugging_face(is_streamed=False), True),
        (lambda: _of_hugging_face(is_streamed=True), False),
    ],
    ids=["tf", "tf, seed", "torch", "torch, shuffled", "torchdata", "datasets", "streamed"],
)
def test_reader_of_another_library_goes_on(make: Any, has_state_before: bool) -> None:
    """As an uninterrupted one, whose state before it is read fixes the order if it has one."""

    def opened(state: Any = None) -> Any:
        reader = as_source(make()).open(0)
        if state is not None:
            reader.restore(json.loads(json.dumps(state)))
        return reader

    undisturbed = opened()
    state_of_all = undisturbed.state() if has_state_before else None
    expected = _rows(undisturbed)
    for num_read in (1, 2, len(expected) - 1):
        again = opened(state_of_all)
        assert _rows(next(again) for _ in range(num_read)) == expected[:num_read]
        assert _rows(opened(again.state())) == expected[num_read:]


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


def test_endless_pydataset_has_no_end() -> None:
    class Endless(Batches):
        num_batches = None  # pyright: ignore[reportAssignmentType]

    source = as_source(Endless())
    assert source.cardinality == INFINITE_CARDINALITY
    reader = source.open(0)
    assert [next(reader)[0] for _ in range(6)] == [0, 2, 4, 6, 8, 10]


def test_batches_are_kept_apart_from_a_generator_that_fills_one_array() -> None:
    buffer = np.zeros(2)
    filled = (np.add(buffer * 0, number, out=buffer) for number in range(3))
    assert values_of(list(as_source(filled).open(0))) == [[[0, 0]], [[1, 1]], [[2, 2]]]


# Datasets of Ray Data: refusals, with stand-ins; `validation/ray` reads real ones.


class DataIterator:
    """Batches of one process, as from `streaming_split`; notes the options of each reading."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def iter_batches(self, **options: Any) -> Iterator[dict[str, np.ndarray]]:
        self.options.append(options)
        yield from ({"id": np.array([number])} for number in range(3))


class Dataset(DataIterator):
    """A dataset that can be shuffled."""

    def random_shuffle(self, *, seed: int) -> Dataset:
        self.options.append({"seed": seed})
        return self


for stand_in in (DataIterator, Dataset):
    stand_in.__module__ = "ray.data"


def _source(dataset: Any, **options: Any) -> RayDataSource:
    source = sg.input.Dataset(dataset, batch_size=2, **options).as_source()
    assert isinstance(source, RayDataSource)
    return source


def test_options_reach_ray_in_each_epoch() -> None:
    dataset = Dataset()
    source = _source(dataset, shuffle=True, seed=5, drop_remainder=True)
    for epoch in range(2):
        assert [batch["id"].item() for batch in source.open(epoch)] == [0, 1, 2]
    batching = {"batch_format": "numpy", "batch_size": 2, "drop_last": True}
    assert dataset.options == [{"seed": 5}, batching, {"seed": 6}, batching]


def test_what_ray_cannot_do_is_refused() -> None:
    assert _source(DataIterator()).auto_shard_policy == sg.AutoShardPolicy.OFF
    with pytest.raises(ValueError, match="passed to a strategy of several processes"):
        _ = _source(Dataset()).auto_shard_policy
    with pytest.raises(ValueError, match="shuffle=True was passed with a Ray DataIterator"):
        _source(DataIterator(), shuffle=True)
    reader = _source(Dataset()).open(0)
    for method in (reader.state, lambda: reader.restore({})):
        with pytest.raises(NotImplementedError, match="position in a dataset of Ray Data cannot"):
            method()
    with pytest.raises(ValueError, match="An object of type Dataset of Ray Data was passed"):
        as_source(Dataset())  # rows, not batches
    with pytest.raises(TypeError, match="Ray's own executor reads"):
        sg.input.service.register_dataset("127.0.0.1:1", _source(Dataset()))
