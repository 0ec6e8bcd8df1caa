"""Reading a run folder, and reports of unreadable lines."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stratagem.errors import NotFoundError
from stratagem.observe import process_writer
from stratagem.observe import process_writer as memory_sampler
from stratagem.observe.events import (
    EndEvent,
    Event,
    MemoryEvent,
    RunEvents,
    RunFollower,
    StepEvent,
    decode,
    encode,
    read_run,
)
from stratagem.observe.goodput import account_for
from stratagem.observe.process_writer import MemorySampler, current_events, resident_bytes
from stratagem.observe.writer import EventWriter
from tests.fresh_process import run_fresh
from tests.unit.observe.runs import (
    end,
    failure,
    first_step,
    gang_restart,
    members,
    memory,
    notice,
    process,
    progress,
    restart,
    restored,
    save,
    steps,
    write,
)


@pytest.mark.parametrize("made", ["nothing", "folder", "empty", "no start"])
def test_folder_without_events_is_named(tmp_path, made) -> None:
    if made != "nothing":
        (tmp_path / "run").mkdir()
    if made in ("empty", "no start"):
        (tmp_path / "run" / "events").mkdir()
    words = r"run has no events\.\nExpected event files"
    if made == "no start":
        (tmp_path / "run" / "events" / "worker-0.jsonl").write_text(encode(end(3)) + "\n")
        words = r"has no events\. worker-0.jsonl: skipped, because"
    with pytest.raises(NotFoundError, match=words):
        read_run(tmp_path / "run")


_LATER = json.dumps({"version": 2, "kind": "start"})
_STRANGE = json.dumps(json.loads(encode(end(90))) | {"kind": "coffee"})
_NOT_AN_EVENT = "line 1: This line is not an event: "


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "worker-9.jsonl",
            f"{encode(end(3))[:-10]}\n",
            f"{_NOT_AN_EVENT}it is not a complete JSON",
        ),
        ("worker-9.jsonl", f"{_STRANGE}\n", f"{_NOT_AN_EVENT}its kind is 'coffee'"),
        (
            "worker-9.jsonl",
            f"{_LATER}\n" * 3,
            f"{_NOT_AN_EVENT}its version is 2. 2 more lines are unreadable.",
        ),
        ("worker-8.jsonl", encode(end(3)) + "\n", "skipped, because its first event is not a star"),
        ("worker-9.jsonl", None, "directory"),
    ],
    ids=["torn", "unknown", "later version", "no start", "folder"],
)
def test_file_that_cannot_be_read_is_reported_alone(tmp_path, name, content, problem) -> None:
    write(tmp_path, gang_restart())
    path = tmp_path / "events" / name
    path.mkdir() if content is None else path.write_text(content)
    # A last line without an end may still be written.
    with (tmp_path / "events" / "worker-0.1.jsonl").open("a") as file:
        file.write(f"{encode(end(90))}\n{encode(end(91))[:-10]}")
    read = read_run(tmp_path)
    assert read.problems[0].startswith(name)
    assert problem in read.problems[0]
    assert sum(len(one.events) for one in read.processes) == 1 + sum(
        len(one.events) for one in gang_restart().processes
    )


def test_lines_of_threads_are_put_in_order(tmp_path) -> None:
    events: list[Event] = [*save(3, 6, 1), restored(4, 1), first_step(5, 2)]
    one = process("worker 0", 0)
    (tmp_path / "events").mkdir()
    lines = [encode(event) for event in (one.start, *events)]
    (tmp_path / "events" / "worker-0.jsonl").write_text("\n".join([*lines, ""]))
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
        file.write(f"{_STRANGE}\n{encode(end(90))}\n")
    (new,) = follower.poll()
    assert (new.task, new.events) == ("worker 0", (end(90),))
    assert follower.events().problems == read_run(tmp_path).problems != ()
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


# The event writer of a process, each test in a fresh interpreter.

CLUSTER = {"worker": ["a:1", "b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}
STEPS = "import stratagem as sg\nfor step in range(1, 4): sg.goodput.step(step)\n"


def in_task(task_type: str, index: int) -> str:
    return json.dumps({"cluster": CLUSTER, "task": {"type": task_type, "index": index}})


def run_of(folder: Path, program: str, *, code: int = 0, **environment: str) -> RunEvents:
    """Returns the events after a program that exits with this code."""
    ours = ("TF_CONFIG", "STRATAGEM_RESTART_COUNT")
    plain = {name: text for name, text in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**plain, "STRATAGEM_RUN_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return read_run(folder)


def end_of(run: RunEvents) -> EndEvent:
    (process,) = run.processes
    assert isinstance(process.events[-1], EndEvent)
    return process.events[-1]


def test_process_without_a_folder_writes_nothing(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("STRATAGEM_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    process_writer.step(1)
    assert current_events() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("task_type", "index", "num_processes"), [("worker", 2, 3), ("ps", 0, 1)])
def test_task_is_the_one_of_the_cluster(tmp_path, task_type, index, num_processes) -> None:
    environment = {"TF_CONFIG": in_task(task_type, index), "STRATAGEM_RESTART_COUNT": "4"}
    (process,) = run_of(tmp_path, STEPS, **environment).processes
    start = process.start
    assert (start.task_type, start.task_index, start.attempt) == (task_type, index, 4)
    assert start.num_processes == num_processes


def test_process_by_itself_is_worker_0_and_its_steps_are_written(tmp_path) -> None:
    run = run_of(tmp_path / "new", STEPS)
    (process,) = run.processes
    assert (process.task, process.start.attempt, process.start.num_processes) == ("worker 0", 0, 1)
    lines = [event for event in process.events if isinstance(event, StepEvent)]
    assert sum(line.num_steps for line in lines) == lines[-1].step == 3
    account = account_for(run)
    assert (account.num_steps, account.is_over, account.failures) == (3, True, ())


@pytest.mark.slow
def test_steps_of_a_loop_have_the_waits_that_are_counted(tmp_path) -> None:
    """The first step has none, since nothing says when it began."""
    program = (
        "import stratagem as sg\n"
        "from stratagem.observe.wait_clock import wait_clock\n"
        "wait_clock.measures_transfers = {}\n"
        "for step in range(1, 4):\n"
        "    sg.goodput.step(step)\n"
        "    wait_clock.input_s += 0.5\n"
        "    wait_clock.peers_s += 0.25\n"
    )
    for measures, waited_s in ((True, 0.5), (False, None)):
        (process,) = run_of(tmp_path / str(measures), program.format(measures)).processes
        first, rest = (event for event in process.events if isinstance(event, StepEvent))
        assert (first.num_steps, first.waited_s, first.input_s) == (1, None, None)
        assert (rest.num_steps, rest.waited_s, rest.input_s) == (2, waited_s, 1.0)


def test_start_is_that_of_the_process(tmp_path) -> None:
    """Not the time of its first event, which may come much later."""
    before_s = time.time()
    program = "import time\nlooked_at_s = time.time()\n" + STEPS + "print(looked_at_s)"
    lines = run_fresh(program, TF_CONFIG=None, STRATAGEM_RUN_DIR=str(tmp_path))
    (process,) = read_run(tmp_path).processes
    # The system counts starts in hundredths of a second.
    assert before_s - 0.02 <= process.start.time_s <= float(lines[0]) + 0.02


_LEAVES = """
from stratagem.checkpoint.preemption import PreemptionExit
manager = sg.train.CheckpointManager(sg.train.Checkpoint(), os.environ["STRATAGEM_RUN_DIR"], None)
PreemptionExit(sg.TerminationConfig(), manager, "test")._leave()
"""
_LEAVES_AT_ONCE = """
from stratagem.observe.process_writer import close_events
close_events(5, "at once")
os._exit(5)
"""


@pytest.mark.parametrize(
    ("last", "code", "end", "reason"),
    [
        ("", 0, 0, None),
        ("raise ValueError('loss is nan')", 1, 1, "ValueError: loss is nan"),
        ("raise KeyboardInterrupt", -2, 130, "KeyboardInterrupt: "),
        (_LEAVES, 42, 42, "left after notice"),
        ("sg.goodput.current_events().end(7, 'enough'); sys.exit(7)", 7, 7, "enough"),
        (_LEAVES_AT_ONCE, 5, 5, "at once"),
        ("if os.fork() == 0:\n    sg.goodput.step(4)\nelse:\n    os.wait()", 0, 0, None),
    ],
    ids=["well", "error", "interrupt", "notice", "reported", "at once", "forked"],
)
def test_end_is_reported_as_far_as_it_is_known(tmp_path, last, code, end, reason) -> None:
    run = run_of(tmp_path, f"import os, sys\n{STEPS}{last}", code=code)
    found = end_of(run)
    assert (found.code, found.reason) == (end, reason)
    (process,) = run.processes
    assert [type(event).__name__ for event in process.events].count("EndEvent") == 1
    assert max(event.step for event in process.events if isinstance(event, StepEvent)) == 3


def test_environment_that_is_invalid_is_reported(tmp_path) -> None:
    environment = {"TF_CONFIG": "{", "STRATAGEM_RUN_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        env={"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "ValueError" in done.stderr


# Encoding and decoding of events, and rejected lines.

ONE_OF_EACH: list[Event] = [
    gang_restart().processes[0].start,
    first_step(3, 1),
    *save(3, 4, 1, failed="disk full"),
    restored(5, 1),
    failure(6, "worker 1", silence_s=2.5),
    failure(6),
    restart(7, 1),
    notice(8),
    steps(3, 4, 2, 3, waited=0.5),
    dataclasses.replace(steps(3, 4, 2, 3, waited=0.5), input_s=0.1, peers_s=0.2, transfer_s=0.3),
    members(8, 0, 3, pause_s=None, step_s=None),
    members(8, 3, 2, lost="0 2", joined="1", pause_s=0.5),
    progress(8, 7, 10, loss=0.5, accuracy=None),
    memory(8, None),
    memory(8, 12, 34),
    end(9, -9, "killed by SIGKILL\nand more: \u00e9"),
    end(9),
]


@pytest.mark.parametrize("event", ONE_OF_EACH)
def test_event_is_one_line_and_comes_back(event) -> None:
    line = encode(event)
    assert "\n" not in line
    values = json.loads(line)
    assert (values["version"], values["monotonic_s"]) == (1, event.monotonic_s)
    assert decode(json.dumps(values | {"color": "blue"})) == event  # as of a later release


_RESTORED = json.loads(encode(restored(5, 17)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *(
            (line, "it is not a complete JSON object")
            for line in ("", '{"version": 1, "ki', "[1]", "7", "\x00\x00")
        ),
        (json.dumps(_RESTORED | {"version": 2}), "its version is 2"),
        (json.dumps(_RESTORED | {"kind": "coffee"}), "its kind is 'coffee'"),
        (
            json.dumps({name: _RESTORED[name] for name in _RESTORED if name != "source"}),
            "it has no 'source'",
        ),
    ],
)
def test_line_of_another_form_is_refused(line, words) -> None:
    with pytest.raises(ValueError, match=f"This line is not an event: {words}"):
        decode(line)


# Samples of memory, by a thread of their own.

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def samples(folder) -> list[MemoryEvent]:
    (process,) = read_run(folder).processes
    return [event for event in process.events if isinstance(event, MemoryEvent)]


def test_samples_are_written_until_the_stop(tmp_path) -> None:
    third = threading.Event()

    class Counting(EventWriter):
        count = 0

        def memory(self, *arguments, **keywords) -> None:
            super().memory(*arguments, **keywords)
            self.count += 1
            if self.count == 3:
                third.set()

    with Counting(tmp_path, "worker", 0, num_processes=1) as writer:
        sampler = MemorySampler(writer, interval_s=0.01)
        assert third.wait(120)
        sampler.stop()
        assert not sampler._thread.is_alive()
        sampler.device_memory = lambda: (12, 34)
        sampler.sample()
    found = samples(tmp_path)
    assert len(found) >= 4
    assert found[0].device_bytes is None
    assert (found[-1].device_bytes, found[-1].device_limit_bytes) == (12, 34)


class HeldWriter(EventWriter):
    """Holds each sample until `release` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "worker", 0, num_processes=1)
        self.is_sampling = threading.Event()
        self.release = threading.Event()

    def memory(self, *arguments, **keywords) -> None:
        self.is_sampling.set()
        assert self.release.wait(120)
        super().memory(*arguments, **keywords)


def test_stop_waits_for_the_sample_in_progress(tmp_path) -> None:
    with HeldWriter(tmp_path) as writer:
        sampler = MemorySampler(writer, interval_s=1e6)
        assert writer.is_sampling.wait(120)
        threading.Timer(0.05, writer.release.set).start()
        sampler.stop()
        writer.end()
    (process,) = read_run(tmp_path).processes
    assert [type(event) for event in process.events[-2:]] == [MemoryEvent, EndEvent]


def test_sample_that_is_late_is_dropped(tmp_path, monkeypatch) -> None:
    """A device that hangs holds up the end for the limit only."""
    monkeypatch.setattr(memory_sampler, "STOP_LIMIT_S", 0.01)
    with HeldWriter(tmp_path) as writer:
        sampler = MemorySampler(writer, interval_s=1e6)
        assert writer.is_sampling.wait(120)
        sampler.stop()
        writer.end()
        writer.release.set()
        sampler._thread.join(120)
    (process,) = read_run(tmp_path).processes
    assert isinstance(process.events[-1], EndEvent)


def test_resident_memory_is_what_the_kernel_says(tmp_path, monkeypatch) -> None:
    """Of this process: some of what it has asked for, and never more."""
    resident = resident_bytes()
    assert resident is not None
    assert 0 < resident < int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
    monkeypatch.setattr(memory_sampler, "_STATM", tmp_path / "statm")
    assert resident_bytes() is None  # as on a system without it
    (tmp_path / "statm").write_text("2000 250 30 4 0 900 0\n")
    assert resident_bytes() == 250 * PAGE_BYTES
