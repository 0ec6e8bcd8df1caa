"""Input functions of arrays and data frames, against NumPy."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.inputs import numpy_input_fn, pandas_input_fn

X = {"a": np.arange(5), "b": np.arange(10).reshape(5, 2)}
Y = np.arange(5) * 10


def labels_of(input_fn, **options) -> list[list[int]]:
    return [labels.tolist() for _, labels in input_fn(**options)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("size", "epochs", "sizes"),
    [(2, 1, [2, 2, 1]), (4, 3, [4, 4, 4, 3]), (12, 3, [12, 3]), (4, 1, [4, 1])],
)
def test_batches_go_over_the_ends_of_epochs(shuffle, size, epochs, sizes) -> None:
    dataset = numpy_input_fn(X, {"y": Y}, size, epochs, shuffle=shuffle)()
    assert dataset.as_source().cardinality == len(sizes)
    batches = list(dataset)
    labels = np.concatenate([y["y"] for _, y in batches])
    assert [len(y["y"]) for _, y in batches] == sizes
    for epoch in range(epochs):
        rows = labels[5 * epoch : 5 * epoch + 5]
        assert (sorted(rows) if shuffle else rows.tolist()) == Y.tolist()
    a, b = (np.concatenate([features[name] for features, _ in batches]) for name in X)
    np.testing.assert_array_equal(a * 10, labels)  # rows of all arrays stay together
    np.testing.assert_array_equal(b, a[:, None] * 2 + [0, 1])
    again = np.concatenate([y["y"] for _, y in dataset])
    np.testing.assert_array_equal(again, labels)  # as often as it is read


def test_arrays_and_strings_alone_are_batched_as_they_are() -> None:
    names = np.array(["a", "bc", "d"])
    assert [batch.tolist() for batch in numpy_input_fn(names, None, 2, 1, False)()] == [
        ["a", "bc"],
        ["d"],
    ]
    batches = list(numpy_input_fn({"n": names}, batch_size=2, shuffle=False)())
    assert [batch["n"].tolist() for batch in batches] == [["a", "bc"], ["d"]]


def test_without_number_of_epochs_it_never_ends() -> None:
    dataset = numpy_input_fn(X, Y, batch_size=4, num_epochs=None, shuffle=False)()
    assert dataset.as_source().cardinality < 0
    iterator = iter(dataset)
    got = np.concatenate([next(iterator)[1] for _ in range(25)])
    np.testing.assert_array_equal(got, np.tile(Y, 20))


def test_each_epoch_is_shuffled_anew_and_complete() -> None:
    x = np.arange(64)
    batches = list(numpy_input_fn(x, None, 64, num_epochs=3, shuffle=True)())
    assert all(sorted(batch) == list(range(64)) for batch in batches)
    orders = {tuple(batch) for batch in batches} | {tuple(x)}
    assert len(orders) == 4


def test_order_follows_the_global_seed() -> None:
    input_fn = numpy_input_fn(np.arange(64), None, 64, shuffle=True)
    orders = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        orders.append(next(iter(input_fn())).tolist())
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_share_the_examples(shuffle) -> None:
    input_fn = numpy_input_fn(X, Y, 2, shuffle=shuffle)
    shares = [
        np.concatenate(labels_of(input_fn, input_context=sg.InputContext(2, worker, 2)))
        for worker in range(2)
    ]
    assert [sorted(share) for share in shares] == [[0, 20, 40], [10, 30]]


def test_fewer_examples_than_workers_are_an_error() -> None:
    with pytest.raises(ValueError, match="5 examples are too few for 6 workers"):
        numpy_input_fn(X, Y, shuffle=False)(sg.InputContext(6, 0, 6))


WRONG = [
    (ValueError, "shuffle=None is of type NoneType", {"shuffle": None}),
    (ValueError, "batch_size=0", {"batch_size": 0}),
    (ValueError, "num_epochs=0", {"num_epochs": 0}),
    (ValueError, "The arrays of x and y have the shapes", {"x": {}}),
    (ValueError, "The arrays of x and y have the shapes", {"x": np.zeros((0, 3))}),
    (ValueError, "The arrays of x and y have the shapes", {"x": Y[:0], "y": Y[:0]}),
    (ValueError, "The arrays of x and y have the shapes", {"x": np.array(3), "y": np.array(3)}),
    (ValueError, r"The arrays of x and y have the shapes", {"y": np.arange(4)}),
    (TypeError, "y=1 is of type int", {"y": [1, 2, 3, 4, 5]}),
    (TypeError, "x=1 is of type int", {"x": {"a": [1, 2]}}),
    (ValueError, r"names \['a'\] are in both", {"x": {"a": Y}, "y": {"a": Y}}),
]


@pytest.mark.parametrize(("error", "words", "changes"), WRONG)
def test_what_cannot_be_read_is_an_error(error, words, changes) -> None:
    with pytest.raises(error, match=words):
        numpy_input_fn(**{"x": X, "y": Y, "shuffle": False, **changes})


class Column:
    """Fake pandas Series."""

    def __init__(self, values, index=None) -> None:
        self._values = np.asarray(values)
        self.index = np.arange(len(self._values)) if index is None else np.asarray(index)

    def __len__(self) -> int:
        return len(self._values)

    def to_numpy(self):
        return self._values


class Frame:
    """Fake pandas DataFrame."""

    def __init__(self, columns, index=None) -> None:
        self._columns = {name: Column(values, index) for name, values in columns.items()}
        self.columns = list(columns)
        first = next(iter(self._columns.values()))
        self.index = first.index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, name):
        return self._columns[name]

    def to_numpy(self):
        return np.stack([column.to_numpy() for column in self._columns.values()], 1)


FRAME = Frame({"a": [1, 2, 3], "s": ["x", "y", "z"]}, index=[7, 8, 9])


def test_frame_gives_a_dict_of_columns_and_the_series() -> None:
    input_fn = pandas_input_fn(FRAME, Column([0.1, 0.2, 0.3], [7, 8, 9]), 2, shuffle=False)
    got = [({k: v.tolist() for k, v in x.items()}, y.tolist()) for x, y in input_fn()]
    assert got == [({"a": [1, 2], "s": ["x", "y"]}, [0.1, 0.2]), ({"a": [3], "s": ["z"]}, [0.3])]


def test_frame_of_labels_gives_a_dict() -> None:
    y = Frame({"a": [4, 5, 6], "t": [0, 1, 0]}, index=[7, 8, 9])
    ((features, labels),) = pandas_input_fn(FRAME, y, shuffle=False)()
    assert features["a"].tolist() == [1, 2, 3]
    assert {name: value.tolist() for name, value in labels.items()} == {
        "a": [4, 5, 6],
        "t": [0, 1, 0],
    }
    (features,) = pandas_input_fn(FRAME, shuffle=False)()
    assert sorted(features) == ["a", "s"]


WRONG_FRAMES = [
    (AttributeError, "'dict' object has no attribute 'columns'", {"x": {"a": Y}}),
    (AttributeError, "'Column' object has no attribute 'columns'", {"x": Column([1])}),
    (AttributeError, "'list' object has no attribute 'to_numpy'", {"y": [1, 2, 3]}),
    (ValueError, "x and y have different indices", {"y": Column([1, 2, 3])}),
    (ValueError, "shuffle=None is of type NoneType", {"shuffle": None}),
    (ValueError, "x has a column 's'", {"target_column": "s"}),
]


@pytest.mark.parametrize(("error", "words", "changes"), WRONG_FRAMES)
def test_frame_that_cannot_be_read_is_an_error(error, words, changes) -> None:
    y = Column([1, 2, 3], [7, 8, 9])
    with pytest.raises(error, match=words):
        pandas_input_fn(**{"x": FRAME, "y": y, "shuffle": False, **changes})
