"""`sg.profile`: a trace of chosen training steps and a summary of their time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import keras
from rich.console import Console
from rich.text import Text

from stratagem import environment
from stratagem.errors import explain
from stratagem.keras.training.active_fit import call_after_fit
from stratagem.keras.training.model import observe_steps, strategy_of
from stratagem.observe.profiling import report
from stratagem.observe.profiling.recorder import StepRecorder, observe
from stratagem.observe.profiling.summary import ProfileSummary
from stratagem.resources import checked_folder


def profile(
    steps: tuple[int, int] = (10, 20),
    folder: str | os.PathLike[str] | None = None,
    *,
    workers: Sequence[int] = (0,),
    top: int = 10,
    verbose: bool = True,
) -> StepProfile:
    """Profiles training steps: writes a trace, and prints what their time is spent on.

    Use it as a context manager around a training loop, or as a callback of `fit`. Steps are counted
    in this process: those of `fit`, and calls of `strategy.run` and `run_steps` that change a
    trainable variable. With several steps per call, the profile starts and ends between
    two calls.

    Args:
        steps: the profile starts when the first number of steps is done, and ends when the second
            one is. The first step compiles, so start later.
        folder: folder for the trace, with one folder per worker in it; None for `profile` in the
            run folder `STRATAGEM_RUN_DIR`, or else in the current one.
        workers: ids of the processes to profile; all processes may call this.
        top: number of operations to print.
        verbose: True prints the summary.

    Returns:
        The profile. Its attribute `summary` is an `sg.profiling.ProfileSummary` after the last
        step, or None; `trace` is the path of the trace.

    Raises:
        TypeError: `steps` or `workers` are not integers.
        ValueError: `steps` end before they start, a worker does not exist (when training begins),
            or `folder` is empty.
        OSError: the folder cannot be written (when training begins).
        RuntimeError: another profile is active (when training begins).

    Example:
        >>> import tempfile
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with sg.profile(steps=(1, 3), folder=folder, verbose=False) as profile:
        ...         history = model.fit(np.ones((8, 1)), np.ones(8), batch_size=2, verbose=0)
        >>> profile.summary.num_steps
        2

    Source: JAX, jax.profiler.start_trace; PyTorch, torch.profiler.profile.
    """
    return StepProfile(steps, folder, workers=workers, top=top, verbose=verbose)


class StepProfile(keras.callbacks.Callback):
    """The context manager and callback that `sg.profile` returns."""

    def __init__(
        self,
        steps: tuple[int, int],
        folder: str | os.PathLike[str] | None,
        *,
        workers: Sequence[int],
        top: int,
        verbose: bool,
    ) -> None:
        super().__init__()
        self.steps = _checked_steps(steps)
        self.folder = Path(
            _default_folder() if folder is None else checked_folder("folder", folder)
        )
        self.workers = _checked_workers(workers)
        self.top = top
        self.verbose = verbose
        self.summary: ProfileSummary | None = None
        self.trace: Path | None = None
        self._recorder: StepRecorder | None = None

    def __enter__(self) -> StepProfile:
        process, count = jax.process_index(), jax.process_count()
        missing = [worker for worker in self.workers if worker >= count]
        if missing:
            raise ValueError(
                explain(
                    f"sg.profile received workers={list(self.workers)}, and this run has {count} "
                    f"{'process' if count == 1 else 'processes'}.",
                    expected=f"ids of processes from 0 to {count - 1}.",
                    fix=f"leave out {', '.join(map(str, missing))}.",
                )
            )
        if process in self.workers:
            folder = _writable(self.folder / f"worker-{process}")
            recorder = StepRecorder(*self.steps, folder, self._note)
            observe(recorder)
            self._recorder = recorder
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del error, traceback
        if error_type is not None:
            self._abandon()
        elif self._recorder is not None:
            # The recorder's number of steps is read while it closes.
            try:
                self._recorder.close()
            finally:
                self._recorder = None

    def on_train_begin(self, logs: object = None) -> None:
        """Starts counting steps."""
        self.__enter__()
        call_after_fit(self._abandon)
        model: Any = self.model
        if strategy_of(model) is None:
            observe_steps(model)

    # There is no hook for batches: with one, Keras would wait for the logs of each step.

    def on_test_begin(self, logs: object = None) -> None:
        """Ends the profile before a validation if its last step has run."""
        if self._recorder is not None:
            self._recorder.end_if_done()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Ends the profile after an epoch if its last step has run."""
        self.on_test_begin()

    def on_train_end(self, logs: object = None) -> None:
        """Ends the profile, and warns if it never started."""
        self.__exit__(None, None, None)

    def _abandon(self) -> None:
        """Ends the profile of a training that failed."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop(summarizes=False)

    def _note(self, trace: Path, summary: ProfileSummary) -> None:
        self.trace, self.summary = trace, summary
        if self.verbose and self._recorder is not None:
            console = Console(highlight=False)
            first = self._recorder.num_before
            last = first + max(summary.num_steps, 1) - 1
            title = f"Worker {jax.process_index()}, steps {first} to {last}"
            report.show(summary, title, top=self.top, console=console)
            console.print(Text(f"Trace: {trace.parent}"), soft_wrap=True)


def _default_folder() -> str:
    run_dir = environment.lookup("STRATAGEM_RUN_DIR")
    return os.path.join(run_dir, "profile") if run_dir else "profile"


def _writable(folder: Path) -> Path:
    """Creates a folder, and raises OSError if no file can be created in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise OSError(
            error.errno,
            explain(
                f"sg.profile cannot write to {folder}: {error.strerror}.",
                expected="a folder in which this process can create files.",
                fix="pass folder=.",
            ),
        ) from error


def _checked_steps(steps: tuple[int, int]) -> tuple[int, int]:
    pair: tuple[object, ...] = tuple(steps)
    numbers = [one for one in pair if isinstance(one, int) and not isinstance(one, bool)]
    if len(pair) != 2 or len(numbers) != 2:
        raise TypeError(_steps_message(steps))
    first, end = numbers
    if not 0 <= first < end:
        raise ValueError(_steps_message(steps))
    return first, end


def _steps_message(steps: object) -> str:
    return explain(
        f"sg.profile received steps={steps!r}.",
        expected="the number of steps before the profile and, larger, at its end.",
        fix="pass steps=(10, 20), for example.",
    )


def _checked_workers(workers: Sequence[int]) -> tuple[int, ...]:
    if isinstance(workers, int) or not all(isinstance(one, int) for one in workers):
        raise TypeError(_workers_message(workers))
    if not workers or min(workers) < 0:
        raise ValueError(_workers_message(workers))
    return tuple(workers)


def _workers_message(workers: object) -> str:
    return explain(
        f"sg.profile received workers={workers!r}.",
        expected="one or more ids of processes, from 0.",
        fix="pass workers=[0], or list(range(jax.process_count())) for all.",
    )
