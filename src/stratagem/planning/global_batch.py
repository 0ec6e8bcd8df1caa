"""Captured steps with another global batch size."""

from __future__ import annotations

import dataclasses

from stratagem.devices.finding import placeholder
from stratagem.errors import explain
from stratagem.execution.replica_context import ReplicaBatch
from stratagem.execution.tracing.arguments import Arguments, Leaf
from stratagem.execution.tracing.functionalize import CapturedStep


def with_global_batch(step: CapturedStep, global_batch: int) -> CapturedStep:
    """Returns the same step with another global batch size.

    Args:
        step: the step.
        global_batch: number of examples over all replicas, a multiple of the number of replicas.

    Returns:
        The step, traced again.

    Raises:
        ValueError: `global_batch` is not such a multiple, or the step takes no batch.

    Example:
        >>> import pathlib, tempfile
        >>> program = '''
        ... import keras, numpy, stratagem
        ... with stratagem.MirroredStrategy().scope():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        ...     model.compile("sgd", "mse")
        ... model.fit(numpy.ones((16, 8)), numpy.ones((16, 2)), batch_size=16)
        ... '''
        >>> target = sg.planning.parse_target("8xH100")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = pathlib.Path(folder) / "train.py"
        ...     size = script.write_text(program)
        ...     step = sg.planning.capture_script(script, [], target)
        >>> larger = sg.planning.with_global_batch(step, 1024)
        >>> larger.arguments.batch.size  # examples per replica
        128

    Source: specific to Stratagem.
    """
    replicas = step.strategy.num_replicas_in_sync
    old = _checked_size(step, global_batch)
    size = global_batch // replicas
    several = replicas > 1
    leaves = tuple(_resize(leaf, old, size, several=several) for leaf in step.arguments.leaves)
    split = [placeholder(leaf.shape, leaf.dtype) for leaf in leaves if leaf.split and leaf.shape]
    arguments = Arguments(
        step.arguments.structure, leaves, split, step.arguments.shared, ReplicaBatch(size=size)
    )
    return dataclasses.replace(
        step, arguments=arguments, trace=step.retrace(arguments, step.strategy.topology)
    )


def _checked_size(step: CapturedStep, global_batch: int) -> int:
    """Returns the present batch size of a replica, if the new one can be split."""
    replicas = step.strategy.num_replicas_in_sync
    old = step.arguments.batch.size
    if global_batch < 1 or global_batch % replicas:
        raise ValueError(
            explain(
                f"A global batch of {global_batch} cannot be split over {replicas} replicas.",
                expected="a multiple of the number of replicas.",
                fix=f"use {max(replicas, global_batch - global_batch % replicas)}.",
                code="SG306",
            )
        )
    if old is None:
        raise ValueError(
            explain(
                f"A global batch of {global_batch} was requested, but the step takes no batch.",
                expected="a step with batched arguments.",
                fix="omit the global batch.",
            )
        )
    return old


def _resize(leaf: Leaf, old: int, new: int, *, several: bool) -> Leaf:
    axis = 1 if several else 0
    if not leaf.split or leaf.shape is None or leaf.shape[axis : axis + 1] != (old,):
        return leaf
    shape = (*leaf.shape[:axis], new, *leaf.shape[axis + 1 :])
    return leaf._replace(shape=shape, lengths=None)
