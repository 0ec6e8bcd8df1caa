"""Input functions of what is in memory: NumPy arrays and data frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from stratagem.input import Dataset
from stratagem.input.sources import every_nth
from stratagem.messages import explain
from stratagem.options import InputContext

__all__ = ["numpy_input_fn", "pandas_input_fn"]

_InputFn = Callable[..., Dataset]


def numpy_input_fn(
    x: np.ndarray[Any, Any] | Mapping[str, np.ndarray[Any, Any]],
    y: np.ndarray[Any, Any] | Mapping[str, np.ndarray[Any, Any]] | None = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    queue_capacity: int | None = 1000,
    num_threads: int = 1,
) -> _InputFn:
    """Returns an input function of NumPy arrays.

    Each worker of several gets its share of the examples: every nth one. Batches go over the ends
    of epochs, so that only the very last one can be short. The order of shuffled examples is
    another one in each epoch; it follows from NumPy's global seed, which
    `RunConfig(tf_random_seed=...)` sets.

    Args:
        x: the features: an array, or a dict of arrays.
        y: the labels: an array, or a dict of arrays; None for none.
        batch_size: examples of one replica in a step.
        num_epochs: how often to read the data; None for ever.
        shuffle: whether to shuffle, which has to be said: True for training, False for prediction.
        queue_capacity: accepted and not used: nothing is copied into a queue.
        num_threads: accepted and not used.

    Returns:
        A function that an Estimator takes as `input_fn`.

    Raises:
        TypeError: `x` or `y` of another type.
        ValueError: no data, arrays of different lengths, a name in both dicts, `shuffle` not given,
            or a number below 1; when it is called, fewer examples than workers.

    Example:
        >>> x, y = {"a": np.arange(3)}, np.arange(3) * 2
        >>> input_fn = sg.estimator.numpy_input_fn(x, y, 2, shuffle=False)
        >>> [(features["a"].tolist(), labels.tolist()) for features, labels in input_fn()]
        [([0, 1], [0, 2]), ([2], [4])]

    Source: tensorflow/estimator numpy_io.py, numpy_input_fn.
    """
    del queue_capacity, num_threads
    _check_options(batch_size, num_epochs, shuffle)
    _check_arrays("x", x)
    if y is not None:
        _check_arrays("y", y)
    _check_names_and_lengths(x, y)
    data = x if y is None else (x, y)
    return _input_fn(data, batch_size, num_epochs, shuffle=bool(shuffle))


def pandas_input_fn(
    x: Any,
    y: Any = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    queue_capacity: int | None = 1000,
    num_threads: int = 1,
    target_column: str = "target",
) -> _InputFn:
    """Returns an input function of a pandas `DataFrame`.

    The features are a dict with an array a column; all else is as with `numpy_input_fn`.

    Args:
        x: a data frame.
        y: the labels: a `Series`, or a data frame for a dict of labels; None for none.
        batch_size: examples of one replica in a step.
        num_epochs: how often to read the data; None for ever.
        shuffle: whether to shuffle, which has to be said.
        queue_capacity: accepted and not used.
        num_threads: accepted and not used.
        target_column: the name of the labels of a `Series`, which no feature may have.

    Returns:
        A function that an Estimator takes as `input_fn`.

    Raises:
        TypeError: `x` is no data frame, `y` neither that nor a series, or `target_column` no
            string.
        ValueError: indices of `x` and `y` that differ, a feature with the name of the labels, and
            as for `numpy_input_fn`.

    Example::

        frame = pandas.DataFrame({"age": [31, 52], "height": [1.72, 1.65]})
        input_fn = sg.estimator.pandas_input_fn(frame, shuffle=True, num_epochs=None)

    Source: tensorflow/estimator pandas_io.py, pandas_input_fn.
    """
    del queue_capacity, num_threads
    _check_options(batch_size, num_epochs, shuffle)
    _check_frame("x", x, has_columns=hasattr(x, "columns"))
    _check_labels(x, y, target_column)
    features = _columns(x)
    data = (
        features
        if y is None
        else (features, _columns(y) if hasattr(y, "columns") else y.to_numpy())
    )
    return _input_fn(data, batch_size, num_epochs, shuffle=bool(shuffle))


def _input_fn(data: Any, batch_size: int, num_epochs: int | None, *, shuffle: bool) -> _InputFn:
    num_examples = len(jax.tree.leaves(data)[0])

    def input_fn(input_context: InputContext | None = None) -> Dataset:
        context = InputContext() if input_context is None else input_context
        num_shards, shard = context.num_input_pipelines, context.input_pipeline_id
        if num_examples < num_shards:
            raise ValueError(
                explain(
                    f"{num_examples} examples were to be shared by {num_shards} workers.",
                    expected="at least one example for each worker.",
                    fix="give more examples, or train with fewer workers.",
                )
            )
        examples = data if num_shards == 1 else every_nth(data, num_shards, shard)
        return Dataset(_Batches(examples, batch_size, num_epochs, shuffle=shuffle))

    return input_fn


class _Batches:
    """Batches of all epochs, one after the other."""

    def __init__(
        self, examples: Any, batch_size: int, num_epochs: int | None, *, shuffle: bool
    ) -> None:
        self._examples = examples
        self._num_examples = len(jax.tree.leaves(examples)[0])
        self._batch_size = batch_size
        self._num_epochs = num_epochs
        self._seed = int(np.random.randint(2**31)) if shuffle else None

    def __len__(self) -> int:
        if self._num_epochs is None:
            raise TypeError(
                explain(
                    "The length of data without an end was asked for.",
                    expected="a number of epochs.",
                    fix="pass num_epochs.",
                )
            )
        return -(-self._num_examples * self._num_epochs // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        waiting = np.arange(0)
        for order in self._orders():
            waiting = np.concatenate([waiting, order])
            while len(waiting) >= self._batch_size:
                rows, waiting = np.split(waiting, [self._batch_size])
                yield self._take(rows)
        if len(waiting):
            yield self._take(waiting)

    def _orders(self) -> Iterator[np.ndarray[Any, Any]]:
        """The examples of each epoch, in its order."""
        generator = None if self._seed is None else np.random.default_rng(self._seed)
        epoch = 0
        while self._num_epochs is None or epoch < self._num_epochs:
            rows = np.arange(self._num_examples)
            yield rows if generator is None else generator.permutation(rows)
            epoch += 1

    def _take(self, rows: np.ndarray[Any, Any]) -> Any:
        return jax.tree.map(lambda array: array[rows], self._examples)


def _check_options(batch_size: int, num_epochs: int | None, shuffle: object) -> None:
    if not isinstance(shuffle, bool):
        raise ValueError(
            explain(
                f"shuffle={shuffle!r} does not say whether to shuffle.",
                expected="True or False.",
                fix="pass shuffle=True for training, and False for evaluation and prediction.",
            )
        )
    for name, number in (("batch_size", batch_size), ("num_epochs", num_epochs)):
        if number is not None and number < 1:
            raise ValueError(
                explain(
                    f"{name}={number} is out of range.",
                    expected="a number of at least 1.",
                    fix=f"correct {name}.",
                )
            )


def _check_arrays(name: str, value: Any) -> None:
    arrays = list(value.values()) if isinstance(value, Mapping) else [value]
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                explain(
                    f"{name} is, or holds, {array!r}, of type {type(array).__name__}.",
                    expected="a NumPy array, or a dict of them.",
                    fix="pass np.asarray(values).",
                )
            )
    if not arrays or any(array.size == 0 or not array.shape for array in arrays):
        raise ValueError(
            explain(
                f"{name} holds no examples, or an array that has none.",
                expected="arrays with at least one example on axis 0.",
                fix="see where the data comes from.",
            )
        )


def _check_names_and_lengths(x: Any, y: Any) -> None:
    both = sorted(set(x) & set(y)) if isinstance(x, Mapping) and isinstance(y, Mapping) else []
    if both:
        raise ValueError(
            explain(
                f"The names {both} are in both x and y.",
                expected="each name in one of them.",
                fix="rename the labels.",
            )
        )
    if len({len(array) for array in jax.tree.leaves((x, y))}) != 1:
        shapes = jax.tree.map(np.shape, (x, y))
        raise ValueError(
            explain(
                f"The arrays of x and y have the shapes {shapes}.",
                expected="one length of them all, with the examples on axis 0.",
                fix="cut them to the same examples.",
            )
        )


def _check_frame(name: str, value: Any, *, has_columns: bool) -> None:
    """Looks at what a frame can do, so that pandas itself need not be installed."""
    if not has_columns or not all(hasattr(value, part) for part in ("index", "to_numpy")):
        raise TypeError(
            explain(
                f"{name} is of type {type(value).__name__}.",
                expected="a pandas DataFrame" + (", or a Series." if name == "y" else "."),
                fix="pass arrays to numpy_input_fn.",
            )
        )
    if not len(value):
        raise ValueError(
            explain(
                f"The data frame {name} has no rows.",
                expected="at least one example.",
                fix="see where the data comes from.",
            )
        )


def _columns(frame: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {str(name): frame[name].to_numpy() for name in frame.columns}


def _check_labels(x: Any, y: Any, target_column: str) -> None:
    if not isinstance(target_column, str):
        raise TypeError(
            explain(
                f"target_column={target_column!r} is of type {type(target_column).__name__}.",
                expected="a string.",
                fix="leave it out.",
            )
        )
    if y is None:
        return
    _check_frame("y", y, has_columns=True)
    if not hasattr(y, "columns") and target_column in x.columns:
        raise ValueError(
            explain(
                f"x has a column {target_column!r}, which is the name of the labels.",
                expected="another name.",
                fix="pass another target_column, or remove the column from the features.",
            )
        )
    if not np.array_equal(x.index, y.index):
        raise ValueError(
            explain(
                f"x and y have different indices: {x.index!r} and {y.index!r}.",
                expected="the same rows in the same order.",
                fix="y = y.loc[x.index] brings labels into the order of the features.",
            )
        )
