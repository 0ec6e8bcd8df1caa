"""The cell about slow workers."""

from __future__ import annotations

from stratagem.observe.monitoring.charts import TimeFrame
from stratagem.observe.monitoring.html_report import Cell, load_run, straggler_cell
from stratagem.observe.run_events.records import StepEvent
from tests.unit.observe.goodput.runs import (
    at,
    first_step,
    gang_restart,
    process,
    run,
    straggling,
    write,
)
from tests.unit.observe.stragglers.simulation import Group


def made(folder, events) -> Cell:
    write(folder, events)
    return straggler_cell(load_run(folder), TimeFrame(100.0, []))


def simulated(group: Group):
    """The events that the workers of a group write."""
    by_task: dict[str, list[StepEvent]] = {}
    for task, at_s, event in group.lines():
        fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
        fields |= at(2 + at_s) | {"step": event.step + 1}
        by_task.setdefault(task, []).append(StepEvent(**fields))
    return run(*(process(task, 0, first_step(2, 1), *lines) for task, lines in by_task.items()))


def test_each_worker_has_a_row_and_the_slow_one_a_sentence(tmp_path) -> None:
    group = Group(num_workers=3, slow=1, cause="input", extra_s=0.25, noise=0.0)
    found = made(tmp_path, simulated(group))
    assert found.charts
    assert found.headers[0] == "worker"
    assert [row[0] for row in found.rows] == ["worker 0", "worker 1", "worker 2"]
    assert found.rows[0][1:5] == ("20 ms", "200 ms", "250 ms", "30 ms")
    assert found.rows[1][1:6] == ("270 ms", "200 ms", "0 ms", "30 ms", "input")
    assert found.rows[0][5:] == ("-", "0 ms", "0.0%")
    assert found.note.startswith(
        "worker 1 is slow in input: the others wait 250 ms of each 500 ms step for it, in 200 of "
        "200 steps: "
    )
    assert "49." in found.rows[1][7]  # 50 of 102 seconds


def test_equal_workers_are_named_so(tmp_path) -> None:
    found = made(tmp_path, simulated(Group(num_workers=3)))
    assert found.note.startswith("No worker is slow.")


def test_slow_workers_have_a_row_among_many(tmp_path) -> None:
    group = Group(num_workers=40, num_steps=60, slow=39, cause="compute", extra_s=0.5)
    found = made(tmp_path, simulated(group))
    assert len(found.rows) == 32
    assert (found.rows[-1][0], found.rows[-1][5]) == ("worker 39", "compute")


def test_longest_delay_and_unknown_times_are_shown(tmp_path) -> None:
    found = made(tmp_path, straggling())
    assert found.note.endswith("Darkest: 200 ms per step.")
    assert found.rows[1][1:6] == ("-", "250 ms", "-", "-", "unknown")
    assert "worker 1 is slow: the others wait 200 ms of each 400 ms step for it" in found.note


def test_unmeasured_waits_of_several_workers_are_named(tmp_path) -> None:
    found = made(tmp_path, gang_restart())
    assert found.empty.startswith("8 lines of steps have no measured waits.")


def test_no_worker_is_named_if_steps_do_not_wait_for_all(tmp_path) -> None:
    group = Group(num_workers=3, slow=1, cause="compute", extra_s=0.25, waits_for_all=False)
    found = made(tmp_path, simulated(group))
    assert found.empty.startswith("With backup workers, a step waits for the first workers only.")
    assert not found.rows


def test_one_worker_has_no_stragglers(tmp_path) -> None:
    assert "one worker" in made(tmp_path, run(process("worker 0", 0))).empty
