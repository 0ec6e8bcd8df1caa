"""The batches that an input function gives: features and labels, of all replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np

from stratagem.estimator.loops.host_parts import HostParts
from stratagem.estimator.steps.model_function import arguments_of
from stratagem.messages import explain

__all__ = ["InputFunction", "ModelBatches", "features_and_labels", "require_batch"]


class InputFunction:
    """An input function with its arguments, as a function that makes a dataset. It can be sent.

    Args:
        input_fn: returns a dataset of batches of one replica, `(features, labels)` or `features`;
            or one such batch.
        mode: one of `ModeKeys`, for an `input_fn` that takes it.
        params: likewise.
        config: likewise.
        host_parts: what is done with a batch before it is distributed.
        repeats: whether a single batch is the same in every step; else it is read once.

    Raises:
        TypeError: `input_fn` cannot be called.
    """

    def __init__(
        self,
        input_fn: Any,
        mode: str,
        params: Any,
        config: Any,
        host_parts: HostParts,
        *,
        repeats: bool,
    ) -> None:
        if not callable(input_fn):
            raise TypeError(
                explain(
                    f"input_fn={input_fn!r} of type {type(input_fn).__name__} cannot be called.",
                    expected="a function that returns a dataset.",
                    fix="pass lambda: dataset.",
                )
            )
        told = {"mode": mode, "params": params, "config": config}
        arguments = arguments_of(input_fn)
        self._input_fn = input_fn
        self._given = {name: told[name] for name in arguments if name in told}
        self._takes_context = "input_context" in arguments
        self._host_parts, self._mode = host_parts, mode
        self._repeats = repeats

    def __call__(self, context: Any) -> Any:
        """Returns the dataset.

        Args:
            context: the `InputContext`, for an `input_fn` that takes it.
        """
        extra = {"input_context": context} if self._takes_context else {}
        made = self._host_parts.encoded(self._input_fn(**self._given, **extra), self._mode)
        return _one_batch(made, repeats=self._repeats) if _is_batch(made) else made


class ModelBatches:
    """Iterates once over what an input function returns, distributed over replicas.

    Args:
        input_fn: makes the dataset; given an `InputContext`.
        strategy: whose replicas take the batches in turn.
    """

    def __init__(self, input_fn: Callable[[Any], Any], strategy: Any) -> None:
        with strategy.scope():
            distributed = strategy.distribute_datasets_from_function(input_fn)
            self._iterator: Iterator[Any] = distributed.begin()

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self

    def __next__(self) -> tuple[Any, Any]:
        return features_and_labels(next(self._iterator))

    def first(self) -> tuple[Any, Any]:
        """Returns the first batch, from which the shapes of everything follow.

        Raises:
            ValueError: there is none.
        """
        return require_batch(next(self, None))

    def after(self, first: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
        """Returns an iterator over all batches.

        Args:
            first: what `first` has returned.
        """
        return itertools.chain([first], self)

    def close(self) -> None:
        """Ends reading ahead."""
        self._iterator.close()  # pyright: ignore[reportAttributeAccessIssue]


def _is_batch(made: Any) -> bool:
    """Whether these are arrays: a list of them would be a dataset of batches."""
    if not isinstance(made, tuple | dict | np.ndarray | jax.Array):
        return False
    leaves = jax.tree.leaves(made, is_leaf=lambda leaf: not isinstance(leaf, tuple | list | dict))
    return bool(leaves) and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)


def _one_batch(batch: Any, *, repeats: bool) -> Generator[Any]:
    yield from itertools.repeat(batch) if repeats else (batch,)


def require_batch(batch: Any) -> Any:
    """Returns the first batch of a dataset.

    Args:
        batch: the batch; None where there is none.

    Raises:
        ValueError: there is none.
    """
    if batch is None:
        raise ValueError(
            explain(
                "input_fn gives no batch.",
                expected="a dataset of at least one batch.",
                fix="check what the dataset reads: files may be missing, or all batches short "
                "ones that are dropped.",
            )
        )
    return batch


def features_and_labels(batch: Any) -> tuple[Any, Any]:
    """Returns the two parts of a batch; None for labels where there are none.

    Args:
        batch: `(features, labels)`, or features.

    Raises:
        ValueError: a tuple of other parts.
    """
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) != 2:
        raise ValueError(
            explain(
                f"input_fn gives batches of {len(batch)} parts.",
                expected="(features, labels), or features alone.",
                fix="put several features into a dict, and weights among them.",
            )
        )
    return batch[0], batch[1]
