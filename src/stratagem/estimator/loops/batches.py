"""Batches of an input function: features and labels for all replicas."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.steps.model_function import arguments_of
from stratagem.input.sources.adapters import as_source
from stratagem.input.sources.source import Reader, Source

if TYPE_CHECKING:
    from stratagem.options import InputContext
    from stratagem.strategies.base.strategy import Strategy

# Host transforms: encoding of batches before devices, decoding of predictions after.
#
# Devices cannot hold strings, so string processing happens here.


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTransforms:
    """Functions applied on the host before and after a model function's steps; None for identity.

    `encode` takes a batch, `(features, labels)` or features, and the mode. `decode` takes a
    batch of predictions as NumPy arrays.
    """

    encode: Callable[[Any, str], Any] | None = None
    decode: Callable[[Any], Any] | None = None

    def encode_source(self, data: object, mode: str) -> Any:
        """Encodes the batches of an `input_fn` result, a dataset or a single batch."""
        encode = self.encode
        if encode is None:
            return data
        if isinstance(data[0] if isinstance(data, tuple) and data else data, Mapping):
            return encode(data, mode)
        return _EncodedSource(as_source(data), lambda batch: encode(batch, mode))

    def decode_predictions(self, predictions: object) -> Any:
        """Decodes a batch of predictions."""
        return predictions if self.decode is None else self.decode(predictions)


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
    """Picklable dataset function around an `input_fn`; `repeats` makes a single batch endless."""

    def __init__(
        self,
        input_fn: Callable[..., Any],
        mode: str,
        params: object,
        config: object,
        host_transforms: HostTransforms,
        *,
        repeats: bool,
    ) -> None:
        check_input_fn(input_fn)
        known = {"mode": mode, "params": params, "config": config}
        arguments = arguments_of(input_fn)
        self._input_fn = input_fn
        self._arguments = {name: known[name] for name in arguments if name in known}
        self._takes_context = "input_context" in arguments
        self._host_transforms, self._mode = host_transforms, mode
        self._repeats = repeats

    def __call__(self, context: InputContext) -> Any:
        """Returns the dataset for an input pipeline."""
        extra = {"input_context": context} if self._takes_context else {}
        data = self._input_fn(**self._arguments, **extra)
        data = self._host_transforms.encode_source(data, self._mode)
        return _one_batch(data, repeats=self._repeats) if _is_batch(data) else data


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


def check_input_fn(input_fn: object) -> None:
    """Raises TypeError unless an input function is callable."""
    if not callable(input_fn):
        raise TypeError(
            explain(
                f"input_fn={input_fn!r} of type {type(input_fn).__name__} is not callable.",
                expected="a function that returns a dataset.",
                fix="pass lambda: dataset.",
            )
        )


def _is_batch(data: object) -> bool:
    """Returns True for a batch of arrays; a list of arrays is a dataset instead."""
    if not isinstance(data, tuple | dict | np.ndarray | jax.Array):
        return False
    leaves = jax.tree.leaves(data, is_leaf=lambda leaf: not isinstance(leaf, tuple | list | dict))
    return bool(leaves) and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)


def _one_batch(batch: object, *, repeats: bool) -> Generator[Any]:
    yield from itertools.repeat(batch) if repeats else (batch,)


def require_batch(batch: object) -> Any:
    """Returns the first batch of a dataset; raises ValueError for None."""
    if batch is None:
        raise ValueError(
            explain(
                "input_fn returned an empty dataset.",
                expected="at least one batch.",
                fix="check for missing files, or a single short batch that is dropped.",
            )
        )
    return batch


def features_and_labels(batch: object) -> tuple[Any, Any]:
    """Splits a batch into features and labels; labels are None if there are none."""
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) != 2:
        raise ValueError(
            explain(
                f"input_fn returned batches of {len(batch)} elements.",
                expected="(features, labels), or features alone.",
                fix="put several features, including weights, into a dict.",
            )
        )
    return batch[0], batch[1]
