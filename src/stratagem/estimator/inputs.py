"""Input functions: arrays and data frames in memory, and batches for all replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stratagem.errors import check_number, check_type, invalid
from stratagem.estimator.spec import arguments_of
from stratagem.input.dataset import Dataset
from stratagem.input.sources.adapters import as_source, every_nth
from stratagem.input.sources.source import Reader, Source
from stratagem.options import InputContext

if TYPE_CHECKING:
    from stratagem.strategies.strategy import Strategy


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
    """Returns an input function that reads NumPy arrays.

    With several workers, each reads every nth example. Batches span epoch boundaries, so only the
    very last batch can be short. Each epoch is shuffled differently, by NumPy's global seed, which
    `RunConfig(tf_random_seed=...)` sets.

    Args:
        x: the features, an array or a dict of arrays, shape (examples, ...).
        y: the labels, an array or a dict of arrays; None for no labels.
        batch_size: the per-replica batch size.
        num_epochs: the number of passes over the data; None to repeat forever.
        shuffle: required: True for training, False for evaluation and prediction.
        queue_capacity: ignored; there is no queue.
        num_threads: ignored.

    Returns:
        A function to pass as `input_fn`.

    Raises:
        TypeError: if `x` or `y` holds anything but NumPy arrays.
        ValueError: if there is no data, lengths differ, a name is in both dicts, `shuffle` is
            missing, or a number is below 1; when called, if there are more workers than examples.

    Example:
        >>> x, y = {"a": np.arange(3)}, np.arange(3) * 2
        >>> input_fn = sg.estimator.numpy_input_fn(x, y, 2, shuffle=False)
        >>> [(features["a"].tolist(), labels.tolist()) for features, labels in input_fn()]
        [([0, 1], [0, 2]), ([2], [4])]

    Source: tensorflow/estimator numpy_io.py, numpy_input_fn.
    """
    del queue_capacity, num_threads
    if isinstance(x, Mapping) and isinstance(y, Mapping) and (both := sorted(set(x) & set(y))):
        raise ValueError(f"The names {both} are in both x and y: rename the labels.")
    return _input_fn(x, y, batch_size, num_epochs, shuffle)


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
    """Returns an input function that reads a pandas `DataFrame`.

    The features are a dict with one array per column. Everything else works as in
    `numpy_input_fn`.

    Args:
        x: a data frame.
        y: the labels: a `Series`, a data frame for a dict of labels, or None.
        batch_size: the per-replica batch size.
        num_epochs: the number of passes over the data; None to repeat forever.
        shuffle: required: True or False.
        queue_capacity: ignored.
        num_threads: ignored.
        target_column: a name for the labels of a `Series`, which no feature may have.

    Returns:
        A function to pass as `input_fn`.

    Raises:
        AttributeError: if `x` is not a data frame, or `y` is neither a data frame nor a series.
        ValueError: if the indices of `x` and `y` differ, or as for `numpy_input_fn`.

    Example:
        >>> from unittest import mock
        >>> frame = mock.MagicMock(columns=["age"], index=range(2))  # stands in for a DataFrame
        >>> frame.__len__.return_value = 2
        >>> frame["age"].to_numpy.return_value = np.array([31, 52])
        >>> input_fn = sg.estimator.pandas_input_fn(frame, shuffle=False)
        >>> next(iter(input_fn()))["age"].tolist()
        [31, 52]

    Source: tensorflow/estimator pandas_io.py, pandas_input_fn.
    """
    del queue_capacity, num_threads
    features, labels = _columns(x), None
    if y is not None:
        if not hasattr(y, "columns") and target_column in features:
            raise ValueError(f"x has a column {target_column!r}: pass another target_column.")
        labels = _columns(y) if hasattr(y, "columns") else y.to_numpy()
        if not np.array_equal(x.index, y.index):
            raise ValueError("x and y have different indices: reorder y with y.loc[x.index].")
    return _input_fn(features, labels, batch_size, num_epochs, shuffle)


def _input_fn(
    x: Any, y: Any, batch_size: int, num_epochs: int | None, shuffle: bool | None
) -> _InputFn:
    wanted = "True for training, False for evaluation and prediction"
    check_type("shuffle", shuffle, bool, wanted, error=ValueError)
    check_number("The input function", batch_size=batch_size)
    check_number("The input function", or_none=True, num_epochs=num_epochs)
    for name, arrays in (("x", x), ("y", y)):
        for array in jax.tree.leaves(arrays):
            check_type(name, array, np.ndarray, "a NumPy array, or a dict of them")
    shapes = jax.tree.map(np.shape, (x, y))
    rows = {array.shape[:1] for array in jax.tree.leaves((x, y))}
    if not jax.tree.leaves(x) or len(rows) != 1 or rows & {(), (0,)}:
        raise invalid(
            f"The arrays of x and y have the shapes {shapes}.",
            "the same number of examples, at least one, on axis 0 of every array.",
            "trim the arrays to the same examples.",
        )
    data, ((num_examples,),) = x if y is None else (x, y), rows

    def input_fn(input_context: InputContext | None = None) -> Dataset:
        context = InputContext() if input_context is None else input_context
        num_shards, shard = context.num_input_pipelines, context.input_pipeline_id
        if num_examples < num_shards:
            raise ValueError(f"{num_examples} examples are too few for {num_shards} workers.")
        examples = data if num_shards == 1 else every_nth(data, num_shards, shard)
        return Dataset(_EpochBatches(examples, batch_size, num_epochs, shuffle=bool(shuffle)))

    return input_fn


class _EpochBatches:
    """Batches of all epochs in sequence."""

    def __init__(
        self, examples: object, batch_size: int, num_epochs: int | None, *, shuffle: bool
    ) -> None:
        self._examples = examples
        self._num_examples = len(jax.tree.leaves(examples)[0])
        self._batch_size = batch_size
        self._num_epochs = num_epochs
        self._seed = int(np.random.randint(2**31)) if shuffle else None

    def __len__(self) -> int:
        if self._num_epochs is None:
            raise TypeError("Data with num_epochs=None has no length.")
        return -(-self._num_examples * self._num_epochs // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        generator = None if self._seed is None else np.random.default_rng(self._seed)
        waiting = np.arange(0)
        for _ in itertools.count() if self._num_epochs is None else range(self._num_epochs):
            order = np.arange(self._num_examples)
            order = order if generator is None else generator.permutation(order)
            waiting = np.concatenate([waiting, order])
            while len(waiting) >= self._batch_size:
                rows, waiting = np.split(waiting, [self._batch_size])
                yield self._take(rows)
        if len(waiting):
            yield self._take(waiting)

    def _take(self, rows: np.ndarray[Any, Any]) -> Any:
        return jax.tree.map(lambda array: array[rows], self._examples)


def _columns(frame: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {str(name): frame[name].to_numpy() for name in frame.columns}


# Batches of input functions, encoded on the host: devices cannot hold strings.

Encode = Callable[[Any, str], Any]


class _EncodedSource(Source):
    """Data source with a function applied to each batch."""

    def __init__(self, source: Source, encode: Callable[[Any], Any]) -> None:
        self._source = source
        self._encode = encode

    @property
    def cardinality(self) -> int:
        return self._source.cardinality

    def open(self, epoch: int) -> Reader:
        return _EncodingReader(self._source.open(epoch), self._encode)


class _EncodingReader(Reader):
    def __init__(self, reader: Reader, encode: Callable[[Any], Any]) -> None:
        self._reader = reader
        self._encode = encode
        self.has_cheap_state = reader.has_cheap_state

    def read(self) -> Any:
        return self._encode(next(self._reader))

    def state(self) -> Any:
        return self._reader.state()

    def restore(self, state: object) -> None:
        self._reader.restore(state)

    def close(self) -> None:
        self._reader.close()


class InputFunction:
    """Picklable dataset function around an `input_fn`; `repeats` makes a single batch endless.

    `encode` takes a batch, `(features, labels)` or features, and the mode.
    """

    def __init__(
        self,
        input_fn: Callable[..., Any],
        mode: str,
        params: object,
        config: object,
        encode: Encode | None = None,
        *,
        repeats: bool,
    ) -> None:
        check_type("input_fn", input_fn, callable, "a function that returns a dataset")
        known = {"mode": mode, "params": params, "config": config}
        arguments = arguments_of(input_fn)
        self._input_fn = input_fn
        self._arguments = {name: known[name] for name in arguments if name in known}
        self._takes_context = "input_context" in arguments
        self._encode, self._mode = encode, mode
        self._repeats = repeats

    def __call__(self, context: InputContext) -> Any:
        """Returns the dataset for an input pipeline."""
        extra = {"input_context": context} if self._takes_context else {}
        data = self._input_fn(**self._arguments, **extra)
        encode = self._encode
        if encode is not None:
            is_features = isinstance(data[0] if isinstance(data, tuple) and data else data, Mapping)
            data = (
                encode(data, self._mode)
                if is_features
                else _EncodedSource(as_source(data), lambda batch: encode(batch, self._mode))
            )
        if not _is_batch(data):
            return data
        return itertools.repeat(data) if self._repeats else iter([data])


class ModelBatches:
    """One pass over an input function's data, distributed over replicas."""

    def __init__(self, input_fn: Callable[[Any], Any], strategy: Strategy) -> None:
        with strategy.scope():
            distributed = strategy.distribute_datasets_from_function(input_fn)
            self._iterator: Iterator[Any] = distributed.begin()

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self

    def __next__(self) -> tuple[Any, Any]:
        return features_and_labels(next(self._iterator))

    def first(self) -> tuple[Any, Any]:
        """Returns the first batch, which determines all shapes."""
        return require_batch(next(self, None))

    def after(self, first: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
        """Returns an iterator over all batches, starting with the first."""
        return itertools.chain([first], self)

    def close(self) -> None:
        """Stops prefetching."""
        self._iterator.close()  # pyright: ignore[reportAttributeAccessIssue]


def _is_batch(data: object) -> bool:
    """Returns True for a batch of arrays; a list of arrays is a dataset instead."""
    if not isinstance(data, tuple | dict | np.ndarray | jax.Array):
        return False
    leaves = jax.tree.leaves(data, is_leaf=lambda leaf: not isinstance(leaf, tuple | list | dict))
    return bool(leaves) and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)


def require_batch(batch: object) -> Any:
    """Returns the first batch of a dataset; raises ValueError for None."""
    if batch is None:
        raise ValueError(
            "input_fn returned an empty dataset: are files missing, or is one short batch dropped?"
        )
    return batch


def features_and_labels(batch: object) -> tuple[Any, Any]:
    """Splits a batch into features and labels; labels are None if there are none."""
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) != 2:
        raise ValueError(
            f"input_fn returned batches of {len(batch)} elements, not (features, labels) or "
            "features alone: put several features, including weights, into a dict."
        )
    return batch[0], batch[1]
