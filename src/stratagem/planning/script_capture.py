"""Capture of the first training step of a script, which then stops."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from stratagem.devices.finding import planning_for
from stratagem.errors import explain
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

    Example:
        >>> import pathlib, tempfile
        >>> program = '''
        ... import keras, numpy as np, stratagem as sg
        ... with sg.MirroredStrategy().scope():
        ...     model = keras.Sequential([keras.layers.Dense(2)])
        ...     model.compile("sgd", "mse")
        ... model.fit(np.ones((16, 8)), np.ones((16, 2)), batch_size=16)
        ... '''
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = pathlib.Path(folder) / "train.py"
        ...     size = script.write_text(program)
        ...     step = sg.planning.capture_script(script, [], sg.planning.parse_target("8xH100"))
        >>> step.strategy.num_replicas_in_sync, step.arguments.batch.size
        (8, 2)

    Source: specific to Stratagem.
    """
    planning = planning_for(target.topology, shard_state, MirroredStrategy, shard_size)
    with _as_main_program(path := _existing_file(script), arguments), planning:
        return _first_step(path, shard_state)


def _first_step(path: Path, shard_state: str | None) -> CapturedStep:
    how = "ended"
    try:
        step = capture(lambda: runpy.run_path(str(path), run_name="__main__"))
        if step is not None:
            _check_shard_state(step, shard_state)
            return step
    except SystemExit as end:
        how = f"exited with {end.code!r}"
    raise _no_step_error(path, how)


def _no_step_error(path: Path, how: str) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{path} {how} before it trained.",
            expected="a compiled step of fit, train_on_batch or strategy.run that changes a "
            "trainable variable.",
            fix="append the arguments with which the script trains.",
            code="SG802",
        )
    )


def _existing_file(script: str | os.PathLike[str]) -> Path:
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(
            explain(
                f"Script {str(path)!r} does not exist.",
                expected="a Python file.",
                fix="give a path relative to the current directory.",
            )
        )
    return path


def _check_shard_state(step: CapturedStep, shard_state: str | None) -> None:
    strategy = step.strategy
    is_shared = isinstance(strategy.placement, ShardedState) or strategy.num_replicas_in_sync == 1
    if shard_state is not None and not is_shared:
        raise ValueError(
            explain(
                f"shard_state={shard_state!r} was requested, but the script trains under "
                f"{type(strategy).__name__}.",
                expected="a script that uses MirroredStrategy, MultiWorkerMirroredStrategy, "
                "TPUStrategy or no strategy.",
                fix="omit shard_state.",
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
