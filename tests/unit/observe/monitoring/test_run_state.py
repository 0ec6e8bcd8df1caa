"""State of a run from its events, read in one go or as they arrive."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from stratagem.observe import terminal as live_view
from stratagem.observe.events import ProcessEvents, StepEvent, encode
from stratagem.observe.goodput import account_for
from stratagem.observe.run_state import RunSnapshot, RunState, Watcher
from stratagem.observe.terminal import frame
from tests.unit.observe.goodput.runs import (
    EPOCH_S,
    end,
    failure,
    first_step,
    gang_restart,
    members,
    members_come_and_go,
    memory,
    process,
    progress,
    restart,
    run,
    steps,
    straggling,
    warning,
    write,
)


def snapshot(events, second: float) -> RunSnapshot:
    state = RunState()
    state.add(events.processes, EPOCH_S + second)
    return state.snapshot(EPOCH_S + second)


def test_run_with_a_straggler() -> None:
    """The last lines are 50 steps in 20 s."""
    shown = snapshot(straggling(), 41)
    assert (shown.step, shown.total_steps, shown.is_over) == (101, 101, True)
    assert shown.values == {"loss": 1.0, "accuracy": 0.75}
    assert shown.history == (2.0, 1.0)
    assert shown.steps_per_s == 2.5
    first, second = shown.tasks
    assert (first.task, second.task) == ("worker 0", "worker 1")
    assert (first.delay_s, first.is_straggler) == (0.0, False)
    assert second.delay_s == pytest.approx(0.2)
    assert second.is_straggler
    assert (second.cause, second.late_s) == ("unknown", pytest.approx(0.2))
    assert (first.cause, first.late_s) == (None, 0.0)
    assert shown.stragglers == (
        "worker 1 is slow: the others wait 200 ms of each 400 ms step for it",
    )
    assert (first.host_bytes, first.device_bytes) == (300 * 1024**2, 600)
    assert shown.num_warnings == 2
    assert shown.warnings[0].text == "slow <data>"
    assert shown.warnings[0].at_s == 12


def test_events_may_arrive_one_by_one() -> None:
    whole = straggling()
    state = RunState()
    ordered = sorted(
        ((one.at_s(event), one, event) for one in whole.processes for event in one.events),
        key=lambda item: item[0],
    )
    for at_s, one, event in ordered:
        state.add([ProcessEvents(start=one.start, events=(event,))], at_s)
    assert state.snapshot(EPOCH_S + 41) == snapshot(whole, 41)


def test_restart_of_all_workers() -> None:
    shown = snapshot(gang_restart(), 78)
    assert (shown.num_launches, shown.num_restarts, shown.is_over) == (1, 1, True)
    phases = {task.task: (task.phase, task.attempt, task.note) for task in shown.tasks}
    assert phases["worker 1"] == ("finished", 1, "restarted 1x")


def test_lost_and_failed_workers_say_why() -> None:
    events = run(
        process("worker 0", 0, first_step(5, 1), failure(9, "worker 1"), end(10, 1, "no peer")),
        process("worker 1", 0, first_step(5, 1)),
    )
    shown = snapshot(events, 11)
    assert [(task.phase, task.note) for task in shown.tasks] == [
        ("failed", "no peer"),
        ("lost", "no sign of life"),
    ]
    assert not shown.is_over


def test_run_is_not_over_while_its_launcher_may_start_the_tasks_again() -> None:
    events = run(process("launcher 0", 0), process("worker 0", 0, end(10, 1)))
    assert not snapshot(events, 11).is_over


def test_second_launch_replaces_the_first() -> None:
    first = straggling().processes
    second = process("worker 0", 100, first_step(105, 1), memory(106, 5))
    shown = snapshot(run(*first, second), 107)
    assert shown.num_launches == 2
    assert [task.task for task in shown.tasks] == ["worker 0"]
    assert (shown.step, shown.values, shown.num_warnings) == (1, {}, 0)
    assert shown.age_s == 7


def test_launcher_that_starts_again_begins_a_launch_though_it_was_killed_before() -> None:
    one = (process("launcher 0", 0), process("worker 0", 1, first_step(5, 1)))
    two = (process("launcher 0", 60), process("worker 0", 61, first_step(65, 1)))
    assert snapshot(run(*one, *two), 66).num_launches == 2


def test_restart_by_the_launcher_and_a_new_worker_begin_no_launch() -> None:
    early = [process(f"worker {index}", 1, first_step(5, 1), end(20)) for index in range(2)]
    later = process("worker 2", 40, first_step(45, 1))
    assert snapshot(run(process("launcher 0", 0, restart(30, 1)), *early, later), 46).tasks[-1]
    assert snapshot(run(process("launcher 0", 0), *early, later), 46).num_launches == 1
    assert snapshot(gang_restart(), 78).num_launches == 1


def test_time_left_follows_from_speed_and_total() -> None:
    events = run(
        process("worker 0", 0, first_step(10, 1), steps(10, 20, 2, 51), progress(20, 51, 101))
    )
    assert snapshot(events, 21).left_s == pytest.approx(10)
    unknown = run(process("worker 0", 0, first_step(10, 1), steps(10, 20, 2, 51)))
    assert snapshot(unknown, 21).left_s is None


def test_value_that_is_not_finite_is_shown_and_has_no_history() -> None:
    events = run(process("worker 0", 0, progress(5, 1, loss=1.0), progress(6, 2, loss=None)))
    shown = snapshot(events, 7)
    assert (shown.values, shown.history) == ({"loss": None}, (1.0,))


def test_only_the_last_warnings_are_stored() -> None:
    events = run(process("worker 0", 0, *(warning(one, f"number {one}") for one in range(1, 50))))
    shown = snapshot(events, 50)
    assert (shown.num_warnings, len(shown.warnings)) == (49, 20)
    assert shown.warnings[-1].text == "number 49"


def test_start_on_a_clock_that_was_set_back_does_no_harm() -> None:
    """The restarted worker seems to have started before its first process."""
    first, second = process("worker 0", 100, first_step(105, 1)), process("worker 0", 0, attempt=1)
    state = RunState()
    for one in (first, second):
        state.add([one], EPOCH_S + 110)
    shown = state.snapshot(EPOCH_S + 111)
    assert shown.age_s >= 0
    assert all(task.heard_s >= 0 for task in shown.tasks)


def test_folder_without_events_and_json() -> None:
    shown = RunState().snapshot(EPOCH_S)
    assert (shown.step, shown.tasks, shown.num_launches, shown.is_over) == (None, (), 0, False)
    values = json.loads(json.dumps(snapshot(straggling(), 41).as_dict()))
    assert values.keys() == {field.name for field in dataclasses.fields(RunSnapshot)}
    assert values["tasks"][1]["task"] == "worker 1"


def test_restarts_of_members_are_none_of_the_run() -> None:
    shown = snapshot(members_come_and_go(), 62)
    assert (shown.num_members, shown.num_expected, shown.num_restarts) == (3, 3, 0)
    assert [(task.task, task.phase) for task in shown.tasks if "worker" in task.task] == [
        (f"worker {index}", "finished") for index in range(3)
    ]
    other = snapshot(gang_restart(), 78)
    assert (other.num_members, other.num_restarts) == (None, 1)


# Events of a worker that goes on after another one is lost at second 3.
STAYED = (
    *(first_step(2, 1), steps(2, 3, 2, 3), members(4, 1, 1, lost="1", pause_s=0.5)),
    steps(3, 4, 4, 4),
)


def lost_for_good(*last) -> ProcessEvents:
    return process("worker 1", 0, first_step(2, 1), *last)


@pytest.mark.parametrize("last", [(), (end(3.5, 1, "ValueError: bad"),)], ids=["killed", "failed"])
def test_run_is_over_without_a_member_that_stays_lost(last) -> None:
    shown = snapshot(run(process("worker 0", 0, *STAYED), lost_for_good(*last)), 5)
    assert not shown.is_over
    events = run(process("worker 0", 0, *STAYED, end(5)), lost_for_good(*last))
    shown = snapshot(events, 6)
    assert shown.is_over
    lost = shown.tasks[1]
    assert (lost.phase, lost.note) == ("lost", "the others continue")


def test_process_that_started_after_a_loss_is_not_the_lost_one() -> None:
    """Worker 1 starts at 3.25, before the others report that it was lost at 3."""
    again = process("worker 1", 3.25, attempt=1)
    shown = snapshot(run(process("worker 0", 0, *STAYED), lost_for_good(), again), 5)
    assert [task.phase for task in shown.tasks] == ["running", "restarting"]


# Frames of the terminal view.


def shown(events, second: float, account=None) -> str:
    console = Console(file=io.StringIO(), width=140)
    account = account or account_for(events)
    console.print(frame("runs/digits", snapshot(events, second), account))
    return console.file.getvalue()


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"│ {name}")]
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_frame_shows_a_straggler_and_all_figures() -> None:
    text = shown(straggling(), 41)
    assert text.startswith("runs/digits  finished  41.0 s since the start\n")
    assert "101 of 101" in text
    assert "2.5 steps/s" in text
    assert "Goodput after start-up: " in text
    assert "start-up took 10.0 s" in text
    assert "start-up 10.0 s" in text
    assert row(text, "worker 1") == [
        "worker 1",
        "finished",
        "101",
        "-",
        "200 ms",
        "300 MiB",
        "0 MiB of 0 MiB",
        "",
    ]
    assert "worker 1 is slow: the others wait 200 ms of each 400 ms step for it.\n" in text
    assert "2 warnings, the last ones" in text
    assert "12.0 s worker 1 UserWarning: slow <data>" in text
    values = [line.split()[0] for line in text.splitlines() if line.startswith(("loss", "acc"))]
    assert values == ["loss", "accuracy"]
    assert "█▁" in text


def test_running_worker_says_when_it_was_heard() -> None:
    text = shown(run(process("worker 0", 0, first_step(5, 1))), 9)
    assert text.startswith("runs/digits  running  9.0 s since the start\n")
    assert row(text, "worker 0")[1:5] == ["running", "1", "4 s ago", "-"]


def test_launcher_has_no_row_and_restarts_are_counted() -> None:
    text = shown(gang_restart(), 78)
    assert "launcher" not in text
    assert ", 1 restart\n" in text


@pytest.mark.parametrize("loss", [1.0, None])
def test_value_that_is_not_finite_is_named(loss) -> None:
    text = shown(run(process("worker 0", 0, progress(5, 1, loss=loss))), 6)
    assert ("not finite" in text) is (loss is None)


def test_only_some_of_many_workers_have_a_row() -> None:
    text = shown(run(*(process(f"worker {index}", 0) for index in range(40))), 5)
    assert "and 8 more" in text
    assert text.count("│ starting") == 32


def test_text_of_a_run_is_not_markup_and_problems_are_shown() -> None:
    events = straggling()
    account = dataclasses.replace(account_for(events), problems=("[bold]torn[/bold]",))
    assert "Unreadable: [bold]torn[/bold]" in shown(events, 41, account)


def test_cause_of_a_slow_worker_is_in_its_row() -> None:
    events = run(
        *(
            process(f"worker {rank}", 0, first_step(10, 1), measured(input_s))
            for rank, input_s in enumerate((1.0, 11.0))
        )
    )
    text = shown(events, 21)
    assert row(text, "worker 0")[4] == "0 ms"
    assert row(text, "worker 1")[4] == "200 ms (input)"
    assert "worker 1 is slow in input: the others wait 200 ms of each 400 ms step" in text


def measured(input_s: float) -> StepEvent:
    """50 steps in 20 s, with 5 s of computing and some of input."""
    line = steps(10, 30, 2, 51, waited=15.0 - input_s)
    return dataclasses.replace(line, input_s=input_s)


def before(second: float):
    """The events of a run with changes of members, up to a moment."""
    whole = members_come_and_go()
    return run(
        *(
            ProcessEvents(
                start=one.start,
                events=tuple(event for event in one.events if event.monotonic_s <= second),
            )
            for one in whole.processes
            if one.start.monotonic_s <= second
        )
    )


def test_members_of_a_group_are_counted() -> None:
    text = shown(before(21.75), 21.75)
    assert text.startswith("runs/digits  running  21.8 s since the start, 2 of 3 workers\n")
    assert row(text, "worker 1")[1] == "lost"
    assert row(text, "worker 1")[-1] == "the others continue"
    assert "2 of 3 members; lost 1 time, joined 0 times; training stood still for 1.0 s" in text
    text = shown(before(32), 32)
    assert text.startswith("runs/digits  running  32.0 s since the start, 3 of 3 workers\n")
    assert "workers" not in shown(gang_restart(), 30).splitlines()[0]


# Loops over a growing folder; tests/unit/cli/test_other_commands.py has one in a terminal.


def test_view_ends_with_the_run(tmp_path, capsys) -> None:
    write(tmp_path, straggling())
    live_view.show_live("run", Watcher(tmp_path), 1e6)
    assert "finished" in capsys.readouterr().out


def test_exports_end_a_while_after_the_run(tmp_path, monkeypatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(live_view.time, "monotonic", lambda: seconds[0])

    def sleep(interval_s: float) -> None:
        seconds[0] += interval_s
        if seconds[0] == 30:
            with (tmp_path / "events" / "worker-0.0.jsonl").open("a") as file:
                file.write(encode(end(30)) + "\n")

    monkeypatch.setattr(live_view.time, "sleep", sleep)
    write(tmp_path, run(process("worker 0", 0, first_step(5, 1))))
    live_view.export(Watcher(tmp_path), 1.0)
    assert seconds[0] == pytest.approx(30 + 60, abs=1.5)
