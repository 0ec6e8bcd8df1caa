"""The event writer of a process, each test in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stratagem.observe.goodput.account import account_for
from stratagem.observe.run_events import process_writer
from stratagem.observe.run_events.process_writer import current_events
from stratagem.observe.run_events.reader import RunEvents, read_run
from stratagem.observe.run_events.records import EndEvent, StepEvent
from tests.fresh_process import run_fresh

CLUSTER = {"worker": ["a:1", "b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}
STEPS = "import stratagem as sg\nfor step in range(1, 4): sg.goodput.step(step)\n"


def in_task(task_type: str, index: int) -> str:
    return json.dumps({"cluster": CLUSTER, "task": {"type": task_type, "index": index}})


def run_of(folder: Path, program: str, *, code: int = 0, **environment: str | None) -> RunEvents:
    """Returns the events after a program that exits with this code."""
    guarded = (
        "import subprocess, sys\n"
        f"done = subprocess.run([sys.executable, '-c', {program!r}], stderr=subprocess.PIPE)\n"
        f"assert done.returncode == {code}, (done.returncode, done.stderr)\n"
    )
    plain = {"TF_CONFIG": None, "STRATAGEM_RESTART_COUNT": None}
    run_fresh(guarded, **{**plain, "STRATAGEM_RUN_DIR": str(folder), **environment})
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


@pytest.mark.parametrize(
    ("task_type", "index", "num_processes"),
    [("worker", 2, 3), ("ps", 0, 1), ("evaluator", 0, 1)],
)
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
        "from stratagem.observe.run_events.wait_clock import wait_clock\n"
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
from stratagem.checkpoint.preemption_exit import PreemptionExit
manager = sg.train.CheckpointManager(sg.train.Checkpoint(), os.environ["STRATAGEM_RUN_DIR"], None)
PreemptionExit(sg.TerminationConfig(), manager, "test")._leave()
"""


@pytest.mark.parametrize(
    ("last", "code", "reason"),
    [
        ("", 0, None),
        ("raise ValueError('loss is nan')", 1, "ValueError: loss is nan"),
        (_LEAVES, 42, "left after notice"),
        ("sg.goodput.current_events().end(7, 'enough'); sys.exit(7)", 7, "enough"),
        ("sg.goodput.close_events(5, 'at once'); os._exit(5)", 5, "at once"),
    ],
)
def test_end_is_reported_as_far_as_it_is_known(tmp_path, last, code, reason) -> None:
    end = end_of(run_of(tmp_path, f"import os, sys\n{STEPS}{last}", code=code))
    assert (end.code, end.reason) == (code, reason)


def test_interrupt_is_reported_with_the_code_of_shells(tmp_path) -> None:
    end = end_of(run_of(tmp_path, f"{STEPS}raise KeyboardInterrupt", code=-2))
    assert (end.code, end.reason) == (130, "KeyboardInterrupt: ")


def test_forked_child_writes_nothing(tmp_path) -> None:
    program = f"import os\n{STEPS}if os.fork() == 0:\n    sg.goodput.step(4)\nelse:\n    os.wait()"
    (process,) = run_of(tmp_path, program).processes
    kinds = [type(event).__name__ for event in process.events]
    assert kinds.count("EndEvent") == 1
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
