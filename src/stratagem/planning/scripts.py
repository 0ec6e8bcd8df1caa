"""Takes the training step out of a script: the script runs until there, and no further."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from stratagem.execution.programs.step_capture import CapturedStep, capture
from stratagem.messages import explain
from stratagem.planning.targets import Target
from stratagem.topology.absent import planning_for
from stratagem.variables import ShardedState

__all__ = ["capture_script"]


def capture_script(
    script: str | os.PathLike[str],
    arguments: Sequence[str],
    target: Target,
    shard_state: str | None = None,
) -> CapturedStep:
    """Runs a script until its first training step, as if it ran on a machine that is not here.

    Its strategies have the machine's replicas, and its variables take no memory. Reading data,
    building the model and its callbacks run as always; at the first step of `fit`,
    `train_on_batch`, `strategy.run` or `run_steps` that changes a trainable variable the script
    ends, and its `finally` clauses run. What it prints goes to standard error.

    Args:
        script: a Python file.
        arguments: of the script.
        target: the machine.
        shard_state: what the script's strategy shares out among its replicas, as of
            `MirroredStrategy`, whatever it says itself; None for what it says.

    Returns:
        The step, with its first batch.

    Raises:
        FileNotFoundError: no such file.
        RuntimeError: the script ended before it trained, by itself or by `sys.exit`.
        ValueError: an unknown `shard_state`, or a strategy that can share out nothing.

    Other errors are those of the script.
    """
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(
            explain(
                f"There is no script {str(path)!r}.",
                expected="a Python file.",
                fix="write the path from the present folder on.",
            )
        )
    how = "ended"
    with _as_main_program(path, arguments), planning_for(target.topology, shard_state):
        try:
            step = capture(lambda: runpy.run_path(str(path), run_name="__main__"))
            if step is not None:
                _check_shared(step, shard_state)
                return step
        except SystemExit as end:
            how = f"exited with {end.code!r}"
    raise RuntimeError(
        explain(
            f"{path} {how} before it trained.",
            expected="a step of fit, of train_on_batch or of strategy.run that changes a trainable "
            "variable, compiled and not run eagerly.",
            fix="give the script the arguments with which it trains, behind its name.",
        )
    )


def _check_shared(step: CapturedStep, shard_state: str | None) -> None:
    strategy = step.strategy
    is_shared = isinstance(strategy.placement, ShardedState) or strategy.num_replicas_in_sync == 1
    if shard_state is not None and not is_shared:
        raise ValueError(
            explain(
                f"shard_state={shard_state!r} was asked for, and the script trains under a "
                f"{type(strategy).__name__}.",
                expected="a script of MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy "
                "or no strategy.",
                fix="leave shard_state out.",
            )
        )


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
