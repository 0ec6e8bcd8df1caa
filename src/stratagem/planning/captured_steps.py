"""Captured steps: the first step of a script, and the same with another global batch size."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from stratagem.devices.finding import placeholder, planning_for
from stratagem.errors import explain, invalid
from stratagem.execution.replica_context import ReplicaBatch
from stratagem.execution.tracing.arguments import Arguments, Leaf
from stratagem.execution.tracing.functionalize import CapturedStep, capture
from stratagem.planning.targets import Target
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.variables.placement import ShardedState


def capture_script(
    script: str | os.PathLike[str],
    arguments: Sequence[str],
    target: Target,
    shard_state: str | None = None,
    shard_size: int | None = None,
) -> CapturedStep:
    """Runs a script up to its first training step, on abstract devices of a target.

    Variables take no memory. Data loading and model building run as usual. The first step of `fit`,
    `train_on_batch`, `strategy.run` or `run_steps` that changes a trainable variable ends the
    script; its `finally` clauses run. Its output goes to standard error.

    Args:
        script: path of a Python file.
        arguments: command-line arguments of the script.
        target: the machine.
        shard_state: overrides the script's sharded state, as in `MirroredStrategy`; None keeps it.
        shard_size: overrides the number of replicas that store one copy of it; None keeps it.

    Returns:
        The step, with its first batch.

    Raises:
        FileNotFoundError: the file does not exist.
        RuntimeError: the script ended before it trained, by itself or by `sys.exit`.
        ValueError: an unknown `shard_state`, or a strategy that cannot shard state.
        Exception: any error of the script.
    """
    path, how = Path(script), "ended"
    if not path.is_file():
        raise FileNotFoundError(
            explain(
                f"Script {str(path)!r} does not exist.",
                expected="a Python file.",
                fix="give a path relative to the current directory.",
            )
        )
    planning = planning_for(target.topology, shard_state, MirroredStrategy, shard_size)
    step = None
    with _as_main_program(path, arguments), planning:
        try:
            step = capture(lambda: runpy.run_path(str(path), run_name="__main__"))
        except SystemExit as end:
            how = f"exited with {end.code!r}"
    if step is None:
        raise RuntimeError(
            explain(
                f"{path} {how} before it trained.",
                expected="a compiled step of fit, train_on_batch or strategy.run that changes a "
                "trainable variable.",
                fix="append the arguments with which the script trains.",
                code="SG802",
            )
        )
    strategy = step.strategy
    is_shared = isinstance(strategy.placement, ShardedState) or strategy.num_replicas_in_sync == 1
    if shard_state is not None and not is_shared:
        raise invalid(
            f"shard_state={shard_state!r} was requested, but the script trains under "
            f"{type(strategy).__name__}.",
            expected="a script that uses MirroredStrategy, MultiWorkerMirroredStrategy, "
            "TPUStrategy or no strategy.",
            fix="omit shard_state.",
        )
    return step


@contextlib.contextmanager
def _as_main_program(path: Path, arguments: Sequence[str]) -> Generator[None]:
    argv, search = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = argv, search


# Captured steps with another global batch size.


def with_global_batch(step: CapturedStep, global_batch: int) -> CapturedStep:
    """Returns the same step with another global batch size.

    Args:
        step: the step.
        global_batch: number of examples over all replicas, a multiple of the number of replicas.

    Returns:
        The step, traced again.

    Raises:
        ValueError: `global_batch` is not such a multiple, or the step takes no batch.
    """
    replicas = step.strategy.num_replicas_in_sync
    old = step.arguments.batch.size
    if global_batch < 1 or global_batch % replicas:
        raise invalid(
            f"A global batch of {global_batch} cannot be split over {replicas} replicas.",
            expected="a multiple of the number of replicas.",
            fix=f"use {max(replicas, global_batch - global_batch % replicas)}.",
            code="SG306",
        )
    if old is None:
        raise invalid(
            f"A global batch of {global_batch} was requested, but the step takes no batch.",
            expected="a step with batched arguments.",
            fix="omit the global batch.",
        )
    size = global_batch // replicas
    axis = int(replicas > 1)  # with several replicas, the first axis is theirs
    leaves = tuple(_resize(leaf, old, size, axis) for leaf in step.arguments.leaves)
    split = [placeholder(leaf.shape, leaf.dtype) for leaf in leaves if leaf.split and leaf.shape]
    arguments = Arguments(
        step.arguments.structure, leaves, split, step.arguments.shared, ReplicaBatch(size=size)
    )
    return dataclasses.replace(
        step, arguments=arguments, trace=step.retrace(arguments, step.strategy.topology)
    )


def _resize(leaf: Leaf, old: int, new: int, axis: int) -> Leaf:
    if not leaf.split or leaf.shape is None or leaf.shape[axis : axis + 1] != (old,):
        return leaf
    shape = (*leaf.shape[:axis], new, *leaf.shape[axis + 1 :])
    return leaf._replace(shape=shape, lengths=None)
