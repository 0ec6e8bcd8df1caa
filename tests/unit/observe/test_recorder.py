"""Recording of chosen steps, with a profiler that notes what it is asked for."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax
import pytest

from stratagem.observe import recorder as module
from stratagem.observe.profiling import find_traces, read_profile, read_profiles
from stratagem.observe.recorder import (
    UNOBSERVED,
    StepRecorder,
    current_observer,
    end_observation,
    observe,
    observed_call,
)
from tests.unit.observe.fabricated_traces import OPERATIONS, cpu_trace, step, two_steps, write


class Profiler:
    """Writes the same trace whatever ran."""

    def __init__(self, monkeypatch, folder) -> None:
        self.notes: list[str] = []
        self.fails = False
        self.content = two_steps()
        self.found: list[object] = []
        self._folder = folder
        monkeypatch.setattr(jax.profiler, "start_trace", self._start)
        monkeypatch.setattr(jax.profiler, "stop_trace", self._stop)
        monkeypatch.setattr(module, "_instructions", lambda trace: {})

    def _start(self, folder, profiler_options) -> None:
        if self.fails:
            raise RuntimeError("Profile has already been started.")
        assert profiler_options.python_tracer_level == 0
        self.notes.append("start")

    def _stop(self) -> None:
        self.notes.append("stop")
        write(self._folder / "plugins" / "profile" / "1" / "vm.xplane.pb", self.content)

    def recorder(self, first: int, end: int) -> StepRecorder:
        made = StepRecorder(first, end, self._folder, lambda *found: self.found.append(found))
        observe(made)
        return made

    def run(self, recorder: StepRecorder, *calls: int) -> None:
        for num_steps in calls:
            with recorder.step(num_steps, tuple):
                self.notes.append(f"run {num_steps}")


@pytest.fixture
def profiler(monkeypatch, tmp_path):
    yield Profiler(monkeypatch, tmp_path)
    if (left := current_observer()) is not None:  # of a failed test
        left.stop(summarizes=False)


def test_steps_are_counted_from_the_first_that_is_left_out(profiler) -> None:
    recorder = profiler.recorder(2, 4)
    profiler.run(recorder, 1, 1, 1, 1, 1)
    assert profiler.notes == [*("run 1", "run 1", "start", "run 1", "run 1", "stop", "run 1")]
    ((path, summary),) = profiler.found
    assert path.name == "vm.xplane.pb"
    assert path.with_name("operations.json").is_file()
    assert summary.num_steps == 2
    assert current_observer() is None
    recorder.close()
    assert profiler.notes.count("stop") == 1


def test_calls_of_many_steps_are_recorded_whole(profiler) -> None:
    recorder = profiler.recorder(3, 5)
    profiler.run(recorder, 4, 4, 4)
    recorder.close()
    assert profiler.notes == ["run 4", "start", "run 4", "stop", "run 4"]
    assert recorder.num_before == 4


def test_other_work_ends_a_recording_that_is_done(profiler) -> None:
    recorder = profiler.recorder(0, 2)
    recorder.end_if_done()
    profiler.run(recorder, 1)
    recorder.end_if_done()
    assert profiler.notes == ["start", "run 1"]
    profiler.run(recorder, 1)
    recorder.end_if_done()
    assert profiler.notes[-1] == "stop"


# The bytes differ between processes: the order of a protobuf's map is not fixed.
@pytest.mark.parametrize(
    "content", [cpu_trace([step(0, 9)], []), b"\xff"], ids=["no operations", "no trace"]
)
def test_trace_that_cannot_be_summarized_is_no_end_of_training(content, profiler) -> None:
    profiler.content = content
    recorder = profiler.recorder(0, 1)
    profiler.run(recorder, 1)
    with pytest.warns(RuntimeWarning, match=r"has no summary: .*vm\.xplane\.pb"):
        recorder.close()
    assert profiler.found == []
    assert current_observer() is None


def test_results_are_awaited_before_and_after(profiler, monkeypatch) -> None:
    monkeypatch.setattr(jax, "block_until_ready", lambda value: profiler.notes.append(value))
    recorder = profiler.recorder(1, 2)
    for name in ("a", "b"):
        with recorder.step(1, lambda name=name: name):
            pass
    recorder.close()
    assert profiler.notes == ["a", "start", "b", "stop"]


def test_step_that_fails_does_not_count(profiler) -> None:
    recorder = profiler.recorder(1, 2)
    with pytest.raises(ZeroDivisionError), recorder.step(1, tuple):
        raise ZeroDivisionError
    assert recorder.num_done == 0
    recorder.stop(summarizes=False)
    assert profiler.notes == []


def test_steps_that_are_not_reached_warn(profiler) -> None:
    recorder = profiler.recorder(10, 20)
    profiler.run(recorder, 4, 4)
    with pytest.warns(RuntimeWarning, match="8 training steps ran, and it starts after 10"):
        recorder.close()
    assert "start" not in profiler.notes
    assert current_observer() is None


def test_profiler_of_another_tool_is_no_end_of_training(profiler) -> None:
    profiler.fails = True
    recorder = profiler.recorder(0, 2)
    with pytest.warns(RuntimeWarning, match="did not start: Profile has already been started"):
        profiler.run(recorder, 1)
    profiler.run(recorder, 1, 1)
    recorder.close()
    assert profiler.notes == ["run 1", "run 1", "run 1"]


def test_failing_devices_end_the_recording(profiler, monkeypatch) -> None:
    monkeypatch.setattr(jax, "block_until_ready", lambda value: value and value())
    recorder = profiler.recorder(0, 2)

    def fails() -> None:
        raise RuntimeError("a device failed")

    with recorder.step(1, lambda: fails):
        pass
    with pytest.raises(RuntimeError, match="a device failed"):
        recorder.close()
    assert profiler.notes[-1] == "stop"


# Traces found in folders, with the layers written beside them.


def _trace(folder: Path, worker: int, time: str, operations: object = None) -> Path:
    path = folder / f"worker-{worker}" / "plugins" / "profile" / time / "vm.xplane.pb"
    return write(path, two_steps(), operations)


def test_latest_profile_of_each_worker(tmp_path) -> None:
    _trace(tmp_path, 0, "2026_01_01_10_00_00")
    latest = _trace(tmp_path, 0, "2026_01_01_11_00_00")
    other = _trace(tmp_path, 1, "2026_01_01_10_30_00")
    assert find_traces(tmp_path) == [latest, other]
    assert list(read_profiles(tmp_path)) == [latest, other]
    assert find_traces(latest.parent) == [latest]


def test_file_and_folder_of_a_trace(tmp_path) -> None:
    trace = _trace(tmp_path, 0, "a", OPERATIONS)
    for path in (trace, tmp_path, str(tmp_path)):
        assert read_profile(path).operations[0].layer == "model/dense"


def test_several_workers_are_no_single_profile(tmp_path) -> None:
    for worker in range(2):
        _trace(tmp_path, worker, "a")
    with pytest.raises(ValueError, match=r"has traces of 2 workers(?s:.)*worker-1"):
        read_profile(tmp_path)


@pytest.mark.parametrize(("name", "why"), [("", "has no trace"), ("missing", "does not exist")])
def test_folder_without_a_trace(name, why, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{why}\.\nExpected a \.xplane\.pb file"):
        find_traces(tmp_path / name)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_damaged_layers_are_an_error(text, tmp_path) -> None:
    trace = _trace(tmp_path, 0, "a")
    trace.with_name("operations.json").write_text(text)
    with pytest.raises(ValueError, match=r"operations\.json cannot be read"):
        read_profile(trace)


# The one observer of training steps.


class Counting:
    def __init__(self) -> None:
        self.notes: list[object] = []

    @contextlib.contextmanager
    def step(self, num_steps, results):
        self.notes.append(num_steps)
        yield
        self.notes.append(results())

    def end_if_done(self) -> None:
        self.notes.append("other work")


@pytest.fixture
def observer():
    counting = Counting()
    observe(counting)
    yield counting
    end_observation(counting)


def test_calls_are_steps_or_other_work(observer) -> None:
    with observed_call(4, lambda: "ready", lambda: True):
        observer.notes.append("runs")
    with observed_call(1, tuple, lambda: False):
        pass
    assert observer.notes == [4, "runs", "ready", "other work"]


def test_second_observer_is_refused(observer) -> None:
    with pytest.raises(RuntimeError, match="while another profile is active"):
        observe(Counting())
    assert current_observer() is observer
    end_observation(Counting())  # not the registered one
    assert current_observer() is observer


def test_nothing_is_observed_without_one() -> None:
    assert current_observer() is None
    assert observed_call(1, tuple, lambda: True) is UNOBSERVED
