"""Reading a run folder, and reports of unreadable lines."""

from __future__ import annotations

import json

import pytest

from stratagem.errors import NotFoundError
from stratagem.observe.run_events.reader import RunFollower, read_run
from stratagem.observe.run_events.records import Event, encode
from tests.unit.observe.goodput.runs import (
    end,
    first_step,
    gang_restart,
    process,
    restored,
    save,
    write,
)


def test_run_is_read_as_it_was_written(tmp_path) -> None:
    write(tmp_path, gang_restart())
    read = read_run(tmp_path)
    assert sorted(read.processes, key=str) == sorted(gang_restart().processes, key=str)
    assert read.problems == ()
    starts_s = [one.start.time_s for one in read.processes]
    assert starts_s == sorted(starts_s)


def test_clock_that_is_set_while_a_process_runs_does_no_harm() -> None:
    one = process("worker 0", 10, first_step(12, 1))
    assert one.at_s(one.events[1]) - one.at_s(one.start) == 2


@pytest.mark.parametrize("made", ["nothing", "folder", "empty"])
def test_folder_without_events_is_named(tmp_path, made) -> None:
    if made != "nothing":
        (tmp_path / "run").mkdir()
    if made == "empty":
        (tmp_path / "run" / "events").mkdir()
    with pytest.raises(NotFoundError, match=r"run has no events\.\nExpected event files"):
        read_run(tmp_path / "run")


def test_torn_last_line_is_reported_and_the_rest_read(tmp_path) -> None:
    write(tmp_path, gang_restart())
    path = tmp_path / "events" / "worker-0.1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    read = read_run(tmp_path)
    (problem,) = read.problems
    number = whole.count(b"\n")
    assert problem == (
        f"worker-0.1.jsonl, line {number}: This line is not an event: "
        "it is not a complete JSON object."
    )
    assert sum(len(one.events) for one in read.processes) == -1 + sum(
        len(one.events) for one in gang_restart().processes
    )


def test_file_of_a_later_version_is_reported_once_and_left_out(tmp_path) -> None:
    write(tmp_path, gang_restart())
    lines = [json.dumps({"version": 2, "kind": "start"})] * 3
    (tmp_path / "events" / "worker-9.jsonl").write_text("\n".join(lines))
    read = read_run(tmp_path)
    assert len(read.processes) == len(gang_restart().processes)
    assert read.problems == (
        "worker-9.jsonl, line 1: This line is not an event: its version is 2. "
        "2 more lines are unreadable.",
    )


def test_file_without_a_start_and_one_that_cannot_be_opened_are_reported(tmp_path) -> None:
    write(tmp_path, gang_restart())
    (tmp_path / "events" / "worker-8.jsonl").write_text(encode(end(3)) + "\n")
    (tmp_path / "events" / "worker-9.jsonl").mkdir()
    without, folder = read_run(tmp_path).problems
    assert without == "worker-8.jsonl: skipped, because its first event is not a start."
    assert folder.startswith("worker-9.jsonl: ")
    assert "directory" in folder


def test_folder_in_which_nothing_can_be_read_is_named_with_the_reason(tmp_path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "worker-0.jsonl").write_text(encode(end(3)) + "\n")
    with pytest.raises(NotFoundError, match=r"has no events\. worker-0.jsonl: skipped, because"):
        read_run(tmp_path)


def test_lines_of_threads_are_put_in_order(tmp_path) -> None:
    events: list[Event] = [*save(3, 6, 1), restored(4, 1), first_step(5, 2)]
    one = process("worker 0", 0)
    (tmp_path / "events").mkdir()
    lines = [encode(event) for event in (one.start, *events)]
    (tmp_path / "events" / "worker-0.jsonl").write_text("\n".join(lines))
    (read,) = read_run(tmp_path).processes
    assert [event.monotonic_s for event in read.events] == [0, 3, 4, 5, 6]


def test_follower_reads_each_event_once(tmp_path) -> None:
    follower = RunFollower(tmp_path)
    assert follower.poll() == ()
    with pytest.raises(NotFoundError, match="has no events"):
        follower.events()
    write(tmp_path, gang_restart())
    news = follower.poll()
    assert sorted(news, key=str) == sorted(gang_restart().processes, key=str)
    assert follower.poll() == ()
    with (tmp_path / "events" / "worker-0.1.jsonl").open("a") as file:
        file.write(encode(end(90)) + "\n")
    (new,) = follower.poll()
    assert (new.task, new.events) == ("worker 0", (end(90),))
    assert sorted(follower.events().processes, key=str) == sorted(
        read_run(tmp_path).processes, key=str
    )


def test_follower_waits_for_the_rest_of_a_line(tmp_path) -> None:
    write(tmp_path, gang_restart())
    follower = RunFollower(tmp_path)
    follower.poll()
    line = encode(end(90, 1, "\u00e9t\u00e9")).encode() + b"\n"
    with (tmp_path / "events" / "worker-0.1.jsonl").open("ab") as file:
        for cut in range(0, len(line), 7):
            assert follower.poll() == ()
            assert follower.events().problems == ()
            file.write(line[cut : cut + 7])
            file.flush()
    (new,) = follower.poll()
    assert new.events == (end(90, 1, "\u00e9t\u00e9"),)


def test_follower_reports_an_unknown_event_and_reads_on(tmp_path) -> None:
    write(tmp_path, gang_restart())
    follower = RunFollower(tmp_path)
    follower.poll()
    strange = json.dumps(json.loads(encode(end(90))) | {"kind": "coffee"})
    with (tmp_path / "events" / "worker-0.1.jsonl").open("a") as file:
        file.write(f"{strange}\n{encode(end(91))}\n")
    (new,) = follower.poll()
    assert new.events == (end(91),)
    (problem,) = follower.events().problems
    assert problem.startswith("worker-0.1.jsonl, line ")
    assert "its kind is 'coffee'" in problem


def test_whole_last_line_without_an_end_counts_once_the_run_is_over(tmp_path) -> None:
    write(tmp_path, gang_restart())
    with (tmp_path / "events" / "worker-0.1.jsonl").open("a") as file:
        file.write(encode(end(90)))
    read = read_run(tmp_path)
    assert read.problems == ()
    assert any(end(90) in one.events for one in read.processes)
