"""Recording of a trace while chosen training steps run."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.extend import backend

from stratagem.errors import explain
from stratagem.observe.profiling import (
    END,
    INPUT,
    INSTRUCTIONS,
    STEP,
    DeviceTrace,
    ProfileSummary,
    find_traces,
    instructions_of,
    read_trace,
    summarize,
)


def input_mark() -> jax.profiler.TraceAnnotation:
    """Returns a context that marks the host's work on the next batch; 0.4 us without a trace."""
    return jax.profiler.TraceAnnotation(INPUT)


# The recorder of this process's training steps, while a profile is taken.

# Reused: entering it costs 0.1 us.
UNOBSERVED = contextlib.nullcontext()


class _ObserverState:
    observer: StepRecorder | None = None


_state = _ObserverState()


def current_observer() -> StepRecorder | None:
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


def observe(observer: StepRecorder) -> None:
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


def end_observation(observer: StepRecorder) -> None:
    """Removes an observer; does nothing if another one is registered."""
    if _state.observer is observer:
        _state.observer = None


class StepRecorder:
    """Records steps `first` up to `end`, counted from 0.

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
        self.num_done = 0
        self.num_before = 0

    @contextlib.contextmanager
    def step(self, num_steps: int, results: Callable[[], Any]) -> Generator[None]:
        """Counts the steps of a call, and marks them in the trace.

        `results` are ready when the steps are done.
        """
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
        """Ends the recording if its last step has run; called before work that is no step."""
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
        finally:
            jax.profiler.stop_trace()
        if summarizes:
            try:
                self._summarize()
            except (OSError, ValueError) as error:  # training must not end for it
                warnings.warn(f"sg.profile has no summary: {error}", RuntimeWarning, stacklevel=2)

    def _summarize(self) -> None:
        path = find_traces(self._folder)[-1]
        trace = read_trace(path)
        instructions = _instructions(trace)
        text = json.dumps({"programs": instructions}, indent=0)
        path.with_name(INSTRUCTIONS).write_text(text, encoding="utf-8")
        self._on_summary(path, summarize(trace, instructions))

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
