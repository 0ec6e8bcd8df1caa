"""Recording of chosen steps, with a profiler that notes what it is asked for."""

from __future__ import annotations

import jax
import pytest

from stratagem.observe.profiling import recorder as module
from stratagem.observe.profiling.recorder import (
    StepRecorder,
    current_observer,
    observe,
    read_profile,
)
from tests.unit.observe.profiling.fabricated import cpu_trace, step, two_steps, write


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


def test_use_of_the_host_is_that_of_the_recorded_steps(profiler, monkeypatch, tmp_path) -> None:
    times_s = iter([100.0, 103.5])
    monkeypatch.setattr(module, "process_tree_s", lambda: next(times_s))
    monkeypatch.setattr(module, "available_cores", lambda: 6.0)
    recorder = profiler.recorder(1, 2)
    profiler.run(recorder, 1, 1, 1)
    ((_, summary),) = profiler.found
    assert (summary.processor_s, summary.num_cores) == (3.5, 6.0)
    read = read_profile(tmp_path)
    assert (read.processor_s, read.num_cores) == (3.5, 6.0)


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


def test_training_that_ends_early_is_summarized(profiler) -> None:
    recorder = profiler.recorder(1, 50)
    profiler.run(recorder, 1, 1)
    recorder.close()
    assert profiler.notes[-1] == "stop"
    assert len(profiler.found) == 1


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
