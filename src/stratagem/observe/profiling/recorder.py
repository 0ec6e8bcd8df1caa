"""Recording of a trace while chosen training steps run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.extend import backend

from stratagem.errors import explain
from stratagem.observe.profiling.summary import ProfileSummary, instructions_of, summarize
from stratagem.observe.profiling.trace import END, STEP, DeviceTrace, read_trace
from stratagem.resources import available_cores, process_tree_s

# The observer of this process's training steps, while a profile is taken.

# Reused: entering it costs 0.1 us.
UNOBSERVED = contextlib.nullcontext()


class StepObserver(Protocol):
    """Is notified of the training steps of this process."""

    def step(
        self, num_steps: int, results: Callable[[], Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context for a call that runs steps; `results` are ready when they are done."""
        ...

    def end_if_done(self) -> None:
        """Ends the profile if its last step has run; called before work that is no step."""
        ...


class _ObserverState:
    observer: StepObserver | None = None


_state = _ObserverState()


def current_observer() -> StepObserver | None:
    """Returns the observer, or None if no profile is taken."""
    return _state.observer


def observed_call(
    num_steps: int, results: Callable[[], Any], trains: Callable[[], bool]
) -> contextlib.AbstractContextManager[None]:
    """Returns a context for a call of a program, which is a training step if it `trains`."""
    observer = _state.observer
    if observer is None:
        return UNOBSERVED
    if trains():
        return observer.step(num_steps, results)
    observer.end_if_done()
    return UNOBSERVED


def observe(observer: StepObserver) -> None:
    """Registers the only observer of this process; raises RuntimeError if there is one."""
    if _state.observer is not None:
        raise RuntimeError(
            explain(
                "sg.profile was entered while another profile is active.",
                expected="one profile at a time.",
                fix="leave the first one, or give one profile all steps: steps=(10, 40).",
            )
        )
    _state.observer = observer


def end_observation(observer: StepObserver) -> None:
    """Removes an observer; does nothing if another one is registered."""
    if _state.observer is observer:
        _state.observer = None


# Files of a profile: the trace, and the layers of the operations in it.

_TRACE = ".xplane.pb"
# Written beside the trace, which has no scopes of operations.
INSTRUCTIONS = "operations.json"
_HOST = ("processor_s", "num_cores")


def find_traces(path: Path) -> list[Path]:
    """Returns the trace files in a folder, of the latest profile of each worker.

    A file may be the trace itself or the one for Perfetto beside it. Raises FileNotFoundError if
    there is none.
    """
    if path.name.endswith(".trace.json.gz"):
        path = path.with_name(path.name.removesuffix(".trace.json.gz") + _TRACE)
    if path.is_file():
        return [path]
    traces = sorted(path.rglob(f"*{_TRACE}")) if path.is_dir() else []
    if not traces:
        problem = "has no trace" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            explain(
                f"{path} {problem}.",
                expected=f"a {_TRACE} file, or a folder with one at any depth.",
                fix="pass the folder given to sg.profile or jax.profiler.start_trace.",
            )
        )
    latest: dict[Path, Path] = {}
    for trace in traces:  # WORKER/plugins/profile/TIME/HOST.xplane.pb
        latest[trace.parent.parent] = trace.parent
    return [trace for trace in traces if latest[trace.parent.parent] == trace.parent]


def read_profiles(path: Path) -> dict[Path, ProfileSummary]:
    """Summarizes the traces that `find_traces` returns."""
    return {trace: _summary_of(trace) for trace in find_traces(path)}


def _summary_of(trace: Path) -> ProfileSummary:
    instructions, host = _read_instructions(trace)
    return dataclasses.replace(summarize(read_trace(trace), instructions), **host)


def read_profile(path: str | Path) -> ProfileSummary:
    """Summarizes a profile of one process.

    Args:
        path: a folder with a trace at any depth, or the `.xplane.pb` file. In a folder, the latest
            profile counts.

    Returns:
        The summary.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: the file is not a trace, lists no operations, or there are several workers'.

    Example:
        >>> import tempfile
        >>> add = jax.jit(lambda x: x + 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jax.profiler.trace(folder):
        ...         three = add(2).block_until_ready()
        ...     summary = sg.profiling.read_profile(folder)
        >>> summary.platform, summary.num_devices, summary.num_steps
        ('cpu', 1, 0)

    Source: JAX, jax.profiler.ProfileData.
    """
    found = read_profiles(Path(path))
    if len(found) > 1:
        raise ValueError(
            explain(
                f"{path} has traces of {len(found)} workers.",
                expected="one trace.",
                fix=f"pass one of: {', '.join(map(str, found))}.",
            )
        )
    return next(iter(found.values()))


def _read_instructions(
    trace: Path,
) -> tuple[dict[str, dict[str, tuple[str, str]]], dict[str, float]]:
    """Returns the instructions and the use of the host that are written beside a trace.

    Both are empty for traces of other tools.
    """
    path = trace.with_name(INSTRUCTIONS)
    if not path.is_file():
        return {}, {}
    try:
        told: Any = json.loads(path.read_text(encoding="utf-8"))
        host = {name: float(told["host"][name]) for name in _HOST} if "host" in told else {}
        instructions = {
            str(program): {
                str(name): (str(kind), str(scope)) for name, (kind, scope) in ops.items()
            }
            for program, ops in told["programs"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            explain(
                f"{path} cannot be read ({type(error).__name__}: {error}).",
                expected="JSON as sg.profile writes it beside a trace.",
                fix="delete it: the summary then has no layers.",
            )
        ) from error
    return instructions, host


class StepRecorder:
    """Records steps `first` up to `end`, counted from 0; a `StepObserver`.

    `on_summary` receives the trace file and its summary. Devices are idle when the recording starts
    and when it ends, so that each operation in it belongs to its steps. `num_done` counts all steps
    of this process, and `num_before` those before the recording.
    """

    def __init__(
        self, first: int, end: int, folder: Path, on_summary: Callable[[Path, ProfileSummary], None]
    ) -> None:
        self._first, self._end = first, end
        self._folder = folder
        self._on_summary = on_summary
        self._results: Callable[[], Any] = tuple
        self._is_recording = False
        self._is_over = False
        self._start_s = 0.0
        self.num_done = 0
        self.num_before = 0

    @contextlib.contextmanager
    def step(self, num_steps: int, results: Callable[[], Any]) -> Generator[None]:
        """Counts the steps of a call, and marks them in the trace; see `StepObserver`."""
        self.end_if_done()
        if not self._is_over and not self._is_recording and self.num_done >= self._first:
            self._start()
        if self._is_recording:
            with jax.profiler.StepTraceAnnotation(
                STEP, step_num=self.num_done, num_steps=num_steps
            ):
                yield
        else:
            yield
        self.num_done += num_steps
        self._results = results

    def end_if_done(self) -> None:
        """Ends the recording if its last step has run."""
        if self._is_recording and self.num_done >= self._end:
            self.stop()

    def _start(self) -> None:
        jax.block_until_ready(self._results())
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # an event per call of Python would slow steps down
        try:
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
        except RuntimeError as error:
            self._give_up(f"JAX's profiler did not start: {error}")
            return
        self._is_recording, self.num_before = True, self.num_done
        self._start_s = process_tree_s()

    def stop(self, *, summarizes: bool = True) -> None:
        """Writes the trace, if any, and ends the observation."""
        was_recording, self._is_recording, self._is_over = self._is_recording, False, True
        end_observation(self)
        if not was_recording:
            return
        try:
            with jax.profiler.TraceAnnotation(END):
                pass
            if summarizes:
                jax.block_until_ready(self._results())
            processor_s = process_tree_s() - self._start_s
        finally:
            jax.profiler.stop_trace()
        if summarizes:
            try:
                self._summarize(processor_s)
            except (OSError, ValueError) as error:  # training must not end for it
                warnings.warn(f"sg.profile has no summary: {error}", RuntimeWarning, stacklevel=2)

    def _summarize(self, processor_s: float) -> None:
        path = find_traces(self._folder)[-1]
        trace = read_trace(path)
        instructions = _instructions(trace)
        host = {"processor_s": processor_s, "num_cores": available_cores()}
        text = json.dumps({"programs": instructions, "host": host}, indent=0)
        path.with_name(INSTRUCTIONS).write_text(text, encoding="utf-8")
        self._on_summary(path, dataclasses.replace(summarize(trace, instructions), **host))

    def close(self) -> None:
        """Ends the recording with the training, and warns if it never started."""
        if self._is_recording or self._is_over:
            self.stop()
            return
        self._give_up(f"{self.num_done} training steps ran, and it starts after {self._first}")

    def _give_up(self, why: str) -> None:
        self._is_over = True
        end_observation(self)
        warnings.warn(
            explain(
                f"sg.profile recorded nothing: {why}.",
                expected="fit or strategy.run to reach the first step, and no other profiler. "
                "Eager steps, and those of parameter servers' workers, are not counted.",
                fix="pass earlier steps, such as steps=(1, 3), or train longer.",
            ),
            RuntimeWarning,
            stacklevel=2,
        )


def _instructions(trace: DeviceTrace) -> dict[str, Mapping[str, tuple[str, str]]]:
    """Returns the instructions of each program in a trace that ran, from its compiled program."""
    ran: dict[str, set[str]] = defaultdict(set)
    for operations in trace.devices.values():
        for one in operations:
            ran[one.module].add(one.name)
    candidates: dict[str, list[dict[str, tuple[str, str]]]] = defaultdict(list)
    for executable in backend.get_backend().live_executables():
        for module in executable.hlo_modules():
            if module.name in ran:
                candidates[module.name].append(instructions_of(module.to_string()))
    chosen: dict[str, Mapping[str, tuple[str, str]]] = {}
    for name, programs in candidates.items():
        # Programs of one function for several shapes have the same name.
        best = max(programs, key=lambda program: (len(ran[name] & program.keys()), -len(program)))
        chosen[name] = {one: best[one] for one in sorted(ran[name] & best.keys())}
    return chosen
