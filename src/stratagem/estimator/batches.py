"""The batches that an input function gives: features and labels, of all replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np

from stratagem.estimator.host_parts import HostParts
from stratagem.estimator.model_function import arguments_of
from stratagem.messages import explain

__all__ = ["ModelBatches"]


class ModelBatches:
    """Iterates once over what an input function returns, distributed over replicas.

    Args:
        input_fn: returns a dataset of batches of one replica, `(features, labels)` or `features`;
            or one such batch.
        strategy: whose replicas take the batches in turn.
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
        strategy: Any,
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
        given = {name: told[name] for name in arguments_of(input_fn) if name in told}
        takes_context = "input_context" in arguments_of(input_fn)

        def dataset(context: Any) -> Any:
            extra = {"input_context": context} if takes_context else {}
            call: Callable[..., Any] = input_fn
            made = host_parts.encoded(call(**given, **extra), mode)
            return _one_batch(made, repeats=repeats) if _is_batch(made) else made

        with strategy.scope():
            distributed = strategy.distribute_datasets_from_function(dataset)
            self._iterator: Iterator[Any] = iter(distributed)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self

    def __next__(self) -> tuple[Any, Any]:
        return _features_and_labels(next(self._iterator))

    def first(self) -> tuple[Any, Any]:
        """Returns the first batch, from which the shapes of everything follow.

        Raises:
            ValueError: there is none.
        """
        batch = next(self, None)
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


def _features_and_labels(batch: Any) -> tuple[Any, Any]:
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
