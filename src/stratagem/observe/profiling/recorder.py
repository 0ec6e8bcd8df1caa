"""Recording of a trace while chosen training steps run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.extend import backend

from stratagem.messages import explain
from stratagem.observe.profiling.marks import END, STEP
from stratagem.observe.profiling.scopes import instructions_of
from stratagem.observe.profiling.step_observer import end_observation
from stratagem.observe.profiling.summary import ProfileSummary, summarize
from stratagem.observe.profiling.trace import DeviceTrace, read_trace
from stratagem.observe.profiling.trace_files import INSTRUCTIONS, find_traces
from stratagem.processor_time import available_cores, process_tree_s


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
