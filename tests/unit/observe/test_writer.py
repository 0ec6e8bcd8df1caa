"""Event files that a writer produces, also after errors and forks."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from stratagem.observe.events import read_run
from stratagem.observe.goodput import account_for
from stratagem.observe.wait_clock import StepWaits
from stratagem.observe.writer import (
    NO_WAITS,
    EventWriter,
    StepAggregator,
    StepRecord,
    restart_count,
)
from tests.unit.observe.runs import members

_KILLED = """
import os, signal, sys
from stratagem.observe.goodput import EventWriter
writer = EventWriter(sys.argv[1], "worker", 0, num_processes=1, interval_s=0)
for step in range(1, 101):
    writer.step(step)
os.kill(os.getpid(), signal.SIGKILL)
"""
_RESTARTED = """
import sys
from stratagem.observe.goodput import EventWriter
with EventWriter(sys.argv[1], "worker", 0, num_processes=1) as writer:
    writer.restored(60, "backup")
    for step in range(61, 151):
        writer.step(step)
    writer.end()
"""


def open_writer(folder: Path, **options: Any) -> EventWriter:
    return EventWriter(folder, "worker", 2, num_processes=4, **({"attempt": 0} | options))


def only_file(folder: Path) -> Path:
    (path,) = (folder / "events").iterdir()
    return path


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in only_file(folder).read_text().splitlines()]


def test_every_event_has_its_kind_and_its_fields(tmp_path) -> None:
    before_s = time.time()
    with open_writer(tmp_path / "new" / "run", attempt=3) as writer:
        writer.restored(10, Path("backup") / "1")
        writer.kept(0.25)
        writer.step(12, num_steps=2, duration_s=0)
        writer.save_started(12, is_asynchronous=True)
        writer.save_ended(12, stall_s=0.25, duration_s=2, is_asynchronous=True, failed="disk full")
        writer.notice("SIGTERM")
        writer.failure("no answer", lost="worker 1", silence_s=30, step=7, reported_by="chief 0")
        writer.restart(4, "worker 1 failed")
        writer.end(42, "preempted")
    lines = written(tmp_path / "new" / "run")
    for line in lines:
        assert line["version"] == 1
        assert before_s - 1 <= line["time_s"] <= time.time()
    times_s = [line["monotonic_s"] for line in lines]
    assert times_s == sorted(times_s)
    assert lines[2]["elapsed_s"] >= 0
    heads = ("version", "time_s", "monotonic_s", "elapsed_s")
    unknown = dict.fromkeys(("waited_s", "idle_s", "input_s", "peers_s", "transfer_s"))
    task = {"task_type": "worker", "task_index": 2, "attempt": 3, "num_processes": 4}
    step = {"step": 12, "num_steps": 2, "duration_s": 0.0, "keeping_s": 0.25, **unknown}
    saved = {"step": 12, "stall_s": 0.25, "duration_s": 2.0, "failed": "disk full"}
    lost = {"lost": "worker 1", "silence_s": 30.0, "step": 7, "reported_by": "chief 0"}
    assert [{k: v for k, v in line.items() if k not in heads} for line in lines] == [
        {"kind": "start", **task, "pid": os.getpid()},
        {"kind": "restored", "step": 10, "source": os.path.join("backup", "1")},
        {"kind": "step", **step},
        {"kind": "save_started", "step": 12, "is_asynchronous": True},
        {"kind": "save_ended", **saved, "is_asynchronous": True},
        {"kind": "notice", "reason": "SIGTERM"},
        {"kind": "failure", "reason": "no answer", **lost},
        {"kind": "restart", "attempt": 4, "cause": "worker 1 failed"},
        {"kind": "end", "code": 42, "reason": "preempted"},
    ]


def test_steps_are_put_together_until_something_else_happens(tmp_path) -> None:
    with open_writer(tmp_path, interval_s=1e9) as writer:
        for step in range(1, 11):
            writer.step(step)
        writer.save_started(10)
        for step in range(11, 21):
            writer.step(step)
        for tell in (lambda: writer.failure("no answer"), lambda: writer.restored(20, "memory")):
            tell()
            for step in range(21, 24):
                writer.step(step)
    lines = [(one["step"], one["num_steps"]) for one in written(tmp_path) if one["kind"] == "step"]
    assert lines == [(1, 1), (10, 9), (20, 10)] + 2 * [(21, 1), (23, 2)]


def test_file_is_named_after_task_attempt_and_process(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_RESTART_COUNT", "7")
    open_writer(tmp_path, attempt=None).close()
    assert only_file(tmp_path).name == f"worker-2.attempt-7.pid-{os.getpid()}.jsonl"
    assert written(tmp_path)[0]["attempt"] == 7


def test_two_processes_of_one_name_have_two_files(tmp_path) -> None:
    """In a container each process may have number 1, and no launcher counts the restarts."""
    for _ in range(3):
        open_writer(tmp_path).close()
    names = sorted(path.name for path in (tmp_path / "events").iterdir())
    stem = f"worker-2.attempt-0.pid-{os.getpid()}"
    assert names == [f"{stem}.2.jsonl", f"{stem}.3.jsonl", f"{stem}.jsonl"]
    assert [len(one.events) for one in read_run(tmp_path).processes] == [1, 1, 1]


def test_killed_process_keeps_its_events_and_the_next_one_continues(tmp_path) -> None:
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    account = account_for(read_run(tmp_path))
    assert (account.num_steps, account.is_over, account.problems) == (100, False, ())
    again = dict(os.environ, STRATAGEM_RESTART_COUNT="1")
    command = [sys.executable, "-c", _RESTARTED, str(tmp_path)]
    subprocess.run(command, timeout=60, check=True, env=again)
    account = account_for(read_run(tmp_path))
    assert (account.num_steps, account.num_repeated, account.is_over) == (150, 40, True)
    (failure,) = account.failures
    assert failure.what == "worker 0 exited without reporting"
    assert sum(account.time_s.values()) == pytest.approx(account.whole_s)


def test_threads_write_whole_lines(tmp_path) -> None:
    with open_writer(tmp_path, interval_s=0) as writer:

        def tell(base: int) -> None:
            for step in range(1, 201):
                writer.step(base + step)
                writer.save_started(base + step)

        threads = [threading.Thread(target=tell, args=(1000 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = written(tmp_path)
    assert sum(line.get("num_steps", 0) for line in lines) == 800
    assert sum(line["kind"] == "save_started" for line in lines) == 800


def test_folder_that_cannot_be_written_is_reported_once(tmp_path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.warns(RuntimeWarning, match="Events of this run are lost") as caught:
        writer = open_writer(tmp_path / "run")
    writer.step(1)
    writer.end()
    writer.close()
    assert len(caught) == 1


def test_full_disk_is_reported_once_and_training_goes_on(tmp_path, monkeypatch) -> None:
    write, answers = os.write, [OSError(errno.ENOSPC, "No space left on device"), 5, None]

    def on_full_disk(descriptor: int, data: bytes) -> int:
        answer = answers.pop(0) if answers else None
        if isinstance(answer, OSError):
            raise answer
        return write(descriptor, data[:answer])

    writer = open_writer(tmp_path, interval_s=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", on_full_disk)
            for step in range(1, 5):
                writer.step(step)
        writer.close()
    assert [str(one.message).splitlines() for one in caught] == [
        [
            "Events of this run are lost: [Errno 28] No space left on device",
            "Expected a run folder with room, to which this process can write.",
            "Fix: check the disk and the permissions of the run folder, STRATAGEM_RUN_DIR.",
        ]
    ]
    # The first line is lost, the second torn, and the rest whole.
    run = read_run(tmp_path)
    assert [getattr(event, "step", None) for event in run.processes[0].events] == [None, 3, 4]
    assert len(run.problems) == 1


def test_forked_process_writes_nothing_and_none_after_the_end(tmp_path, monkeypatch) -> None:
    with open_writer(tmp_path) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: -1)
            writer.step(1)
        writer.step(2)
    writer.step(3)
    writer.close()
    assert [line["kind"] for line in written(tmp_path)] == ["start", "step"]


@pytest.mark.parametrize(
    "call",
    [
        {"step": 0},
        {"step": 3, "num_steps": 0},
        {"step": 3, "num_steps": 4},
        *({"step": 3, "duration_s": one} for one in (-1.0, float("nan"), float("inf"))),
    ],
)
def test_step_that_is_invalid_is_refused(tmp_path, call) -> None:
    with (
        open_writer(tmp_path) as writer,
        pytest.raises(ValueError, match=r"is not a valid step report(?s:.)*counted from 1"),
    ):
        writer.step(**call)
    for interval_s in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="is not a valid interval"):
            open_writer(tmp_path, interval_s=interval_s)


def test_step_with_a_pause_is_written_by_itself(tmp_path) -> None:
    """The change is reported at the end of a step, before the step is."""
    with open_writer(tmp_path, interval_s=1e9) as writer:
        for step in range(1, 4):
            writer.step(step)
        writer.members(members(time.monotonic(), 1, 2, lost="1", pause_s=0.5, step_s=1.0))
        for step in range(4, 7):
            writer.step(step, duration_s=0.5)
    _, _, before, event, *after = written(tmp_path)
    assert (before["step"], before["num_steps"]) == (3, 2)
    assert (event["kind"], event["lost"], event["num_members"]) == ("members", ["worker 1"], 2)
    assert [(one["step"], one["num_steps"]) for one in after] == [(4, 1), (6, 2)]


# Aggregation of steps into records.


def test_first_step_is_a_line_and_the_rest_one_an_interval() -> None:
    lines = StepAggregator(1.0, 0.0)
    assert lines.add(1, 1, None, 5.0) == (StepRecord(0.0, 5.0, 1, 1, 5.0),)
    written = [lines.add(2 + n, 1, 0.1, 5.25 + n * 0.25) for n in range(7)]
    # Those between, and at 6.0 the line of all; it begins where the one before has ended.
    assert [len(one) for one in written] == [0, 0, 0, 1, 0, 0, 0]
    (line,) = written[3]
    assert (line.begin_s, line.end_s, line.step, line.num_steps) == (5.0, 6.0, 5, 4)
    assert round(line.duration_s, 6) == 0.4
    rest = lines.take()
    assert (rest.begin_s, rest.end_s, rest.step, rest.num_steps) == (6.0, 6.75, 8, 3)
    assert lines.take() is None


def test_several_steps_of_a_call() -> None:
    lines = StepAggregator(1.0, 0.0)
    assert lines.add(50, 50, 2.0, 2.0) == (StepRecord(0.0, 2.0, 50, 50, 2.0),)
    assert lines.add(100, 50, None, 2.5) == ()
    assert lines.add(150, 50, None, 3.0) == (StepRecord(2.0, 3.0, 150, 100, 1.0),)


def test_long_pause_is_not_in_a_line() -> None:
    lines = StepAggregator(1.0, 0.0)
    lines.add(1, 1, 1.0, 1.0)
    lines.add(2, 1, 0.5, 1.5)
    assert lines.add(3, 1, 0.5, 60.0) == (
        StepRecord(1.0, 1.5, 2, 1, 0.5),
        StepRecord(59.5, 60.0, 3, 1, 0.5),
    )


def test_steps_that_do_not_follow_are_apart() -> None:
    lines = StepAggregator(10.0, 0.0)
    lines.add(7, 1, 1.0, 1.0)
    lines.add(8, 1, 1.0, 2.0)
    assert lines.add(3, 1, 1.0, 3.0) == (StepRecord(1.0, 2.0, 8, 1, 1.0),)
    assert lines.take() == StepRecord(2.0, 3.0, 3, 1, 1.0)


def test_time_of_something_else_is_in_no_line() -> None:
    lines = StepAggregator(10.0, 0.0)
    lines.add(1, 1, None, 1.0)
    lines.interrupt(4.0, is_restart=False)
    assert lines.add(2, 1, None, 5.0) == ()
    assert lines.take() == StepRecord(4.0, 5.0, 2, 1, 1.0)
    lines.interrupt(6.0, is_restart=True)
    assert lines.add(3, 1, None, 7.0) == (StepRecord(6.0, 7.0, 3, 1, 1.0),)
    # The call has begun before the failure that it has met.
    lines.interrupt(8.0, is_restart=True)
    assert lines.add(4, 1, 2.0, 9.0) == (StepRecord(7.0, 9.0, 4, 1, 2.0),)


def test_state_kept_in_memory_belongs_to_the_time_before_the_next_step() -> None:
    lines = StepAggregator(10.0, 0.0)
    lines.keep(0.25)
    assert lines.add(1, 1, 0.5, 1.0) == (StepRecord(0.0, 1.0, 1, 1, 0.5, 0.25),)
    lines.keep(0.25)
    assert lines.add(2, 1, 0.5, 2.0) == ()
    lines.keep(0.125)
    lines.keep(0.125)
    assert lines.add(3, 1, None, 3.0) == ()  # all the time but that
    assert lines.take() == StepRecord(1.0, 3.0, 3, 2, 1.25, 0.5)
    lines.keep(0.25)
    lines.interrupt(4.0, is_restart=False)
    lines.add(4, 1, None, 5.0)
    assert lines.take() == StepRecord(4.0, 5.0, 4, 1, 1.0)
    # A pause that is longer than a line is in none, with all that was in it.
    lines.keep(0.25)
    assert lines.add(5, 1, 1.0, 30.0) == (StepRecord(29.0, 30.0, 5, 1, 1.0),)


def test_waits_of_a_line_are_added_up_and_unknown_where_a_step_lacks_them() -> None:
    lines = StepAggregator(10.0, 0.0)
    one = StepWaits(waited_s=0.5, input_s=0.25)
    lines.add(1, 1, 1.0, 1.0, one)  # a line by itself
    lines.add(2, 1, 1.0, 2.0, one)
    lines.add(3, 1, 1.0, 3.0, one)
    record = lines.take()
    assert record.waits == one.plus(one)
    event = record.event(7.0)
    assert (event.time_s, event.monotonic_s, event.step, event.num_steps) == (7.0, 3.0, 3, 2)
    assert (event.waited_s, event.input_s, event.peers_s) == (1.0, 0.5, None)
    for step, waits in enumerate((one, NO_WAITS), start=4):
        lines.add(step, 1, 1.0, float(step), waits)
    record = lines.take()
    assert record.event(0.0).waited_s is None


# Number of earlier starts, read from the environment.


def test_count(monkeypatch) -> None:
    monkeypatch.delenv("STRATAGEM_RESTART_COUNT", raising=False)
    assert restart_count() == 0
    for text, count in (("", 0), ("0", 0), ("12", 12)):
        monkeypatch.setenv("STRATAGEM_RESTART_COUNT", text)
        assert restart_count() == count
    for text in ("often", "-1", "1.5"):
        monkeypatch.setenv("STRATAGEM_RESTART_COUNT", text)
        with pytest.raises(ValueError, match=f"STRATAGEM_RESTART_COUNT='{text}' is not a count"):
            restart_count()
