"""Signals to a launcher in a separate process, and its sudden end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from stratagem.launch.options import LaunchOptions
from stratagem.launch.restart.report import LaunchEvents, SlowTasks
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.observe.events import (
    EndEvent,
    FailureEvent,
    NoticeEvent,
    RestartEvent,
    StartEvent,
    encode,
    read_run,
)
from stratagem.observe.stragglers import WINDOW_S
from tests.unit.launch.waiting import is_running, number_in, until
from tests.unit.observe.lockstep_group import Group
from tests.unit.observe.runs import first_step, process, run, write

LAUNCH = "from stratagem.cli import main; main()"
READY = """
import signal, subprocess, time
def ready():
    # One write, so that the line cannot come in pieces.
    sys.stdout.write(f"ready {os.getpid()}\\n")
    while True:
        time.sleep(1000)
"""
GRANDCHILD = f"""{READY}
program = "import os, time; open('child', 'w').write(f'{{os.getpid()}}\\\\n'); time.sleep(1000)"
subprocess.Popen([sys.executable, "-c", program])
while not os.path.exists("child") or not open("child").read().endswith("\\n"):
    time.sleep(0.01)
ready()
"""


@pytest.fixture
def launched(script, folder):
    """Starts a launcher, and waits until all its tasks say that they are ready."""

    @contextlib.contextmanager
    def start(text: str, *options: str, tasks: int = 2) -> Iterator[tuple]:
        command = [sys.executable, "-c", LAUNCH, "launch", "--workers", str(tasks)]
        with subprocess.Popen(
            [*command, *options, script(text)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        ) as launcher:
            try:
                pids = []
                while len(pids) < tasks:
                    line = launcher.stdout.readline()
                    if " ready " not in line:
                        launcher.kill()
                        pytest.fail(line + launcher.stderr.read())
                    pids.append(int(line.split()[-1]))
                yield launcher, pids
            finally:
                launcher.kill()

    return start


def end_of(launcher) -> tuple[int, str, str]:
    out, err = launcher.communicate(timeout=60)
    return launcher.returncode, out, err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_that_ends_the_launcher_ends_the_tasks(launched, signum) -> None:
    """And nothing starts again, though there are restarts left."""
    text = f"{READY}signal.signal(signal.SIGINT, signal.SIG_DFL)\nready()"
    with launched(text, "--max-restarts", "3") as (launcher, pids):
        launcher.send_signal(signum)
        code, out, err = end_of(launcher)
    assert code == 128 + signum
    assert "ready" not in out
    assert "restart" not in err
    assert not any(map(is_running, pids))
    assert f"[launch] {signum.name}: waiting for the tasks to end." in err
    each = ", ".join(f"worker {i} (killed by {signum.name})" for i in range(2))
    assert f"[launch] Ended after {signum.name}: {each}.\n" in err
    assert "failed first" not in err


def test_task_that_fails_because_another_was_interrupted_is_not_the_cause(launched) -> None:
    """One ends by the signal, the other with an error, and neither is told to end twice."""
    text = f"""{READY}
def fail(signum, frame):
    sys.stdout.write(f"got {{signum}}\\n")
    sys.stdout.flush()
    if signum == signal.SIGINT:
        time.sleep(0.5)
    raise SystemExit(3)
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, fail if task["index"] else signal.SIG_DFL)
ready()
"""
    with launched(text) as (launcher, _):
        launcher.send_signal(signal.SIGINT)
        code, out, err = end_of(launcher)
    assert code == 128 + signal.SIGINT
    assert out == "[worker 1] got 2\n"
    assert "Ended after SIGINT: worker 0 (killed by SIGINT), worker 1 (exit code 3).\n" in err


@pytest.mark.parametrize("left", [0, 42])
def test_signal_after_which_tasks_save_ends_all_with_their_code(launched, folder, left) -> None:
    text = f"""{READY}
def save(signum, frame):
    open(f"saved-{{task['index']}}", "w").close()
    raise SystemExit({left})
signal.signal(signal.SIGTERM, save)
ready()
"""
    with launched(text, "--max-restarts", "3") as (launcher, _):
        launcher.send_signal(signal.SIGTERM)
        code, out, err = end_of(launcher)
    assert code == left
    assert "ready" not in out
    each = ", ".join(f"worker {i} (exit code {left})" for i in range(2))
    assert f"Ended after SIGTERM: {each}.\n" in err
    assert "again" not in err
    assert sorted(path.name for path in folder.glob("saved-*")) == ["saved-0", "saved-1"]


def test_other_signals_reach_the_tasks_and_not_their_children(launched, folder) -> None:
    text = f"""{READY}
def tell(signum, frame):
    # SIGTERM is the only one that the child has got.
    ended = f" child {{child.wait()}}" if signum == signal.SIGTERM else ""
    sys.stdout.write(f"got {{signum}}{{ended}}\\n")
for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(signum, tell)
child = subprocess.Popen(["sleep", "1000"])
ready()
"""
    with launched(text) as (launcher, _):
        for signum, told in (
            (signal.SIGUSR1, f"got {int(signal.SIGUSR1)}\n"),
            (signal.SIGUSR2, f"got {int(signal.SIGUSR2)}\n"),
            (signal.SIGTERM, f"got {int(signal.SIGTERM)} child {-signal.SIGTERM}\n"),
        ):
            launcher.send_signal(signum)
            lines = sorted(launcher.stdout.readline() for _ in range(2))
            assert lines == [f"[worker {i}] {told}" for i in range(2)]


def test_second_interrupt_kills(launched) -> None:
    text = f"""{READY}
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_IGN)
ready()
"""
    with launched(text) as (launcher, pids):
        launcher.send_signal(signal.SIGINT)
        assert "Once more kills them" in launcher.stderr.readline()
        assert all(map(is_running, pids))
        launcher.send_signal(signal.SIGINT)
        code, _, err = end_of(launcher)
    assert code == 128 + signal.SIGKILL
    assert "worker 0 (killed by SIGKILL), worker 1 (killed by SIGKILL)" in err
    assert not any(map(is_running, pids))


def test_failure_after_a_signal_still_ends_the_others(launched) -> None:
    """One leaves with an error of its own, the other one would stay for ever."""
    text = f"""{READY}
def leave(signum, frame):
    raise SystemExit(4)
signal.signal(signal.SIGTERM, leave if task["index"] else signal.SIG_IGN)
ready()
"""
    with launched(text, "--grace-s", "0") as (launcher, pids):
        launcher.send_signal(signal.SIGTERM)
        code, _, err = end_of(launcher)
    assert code == 4
    assert "Ended after SIGTERM: worker 0 (killed by SIGKILL), worker 1 (exit code 4).\n" in err
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGQUIT])
def test_launcher_that_dies_at_once_leaves_nothing(launched, folder, signum) -> None:
    with launched(GRANDCHILD, tasks=1) as (launcher, pids):
        grandchild = number_in(folder / "child")
        assert is_running(grandchild)
        launcher.send_signal(signum)
        launcher.wait(60)
        until(lambda: not any(map(is_running, [*pids, grandchild])))


def test_hangup_that_nohup_keeps_away_reaches_nobody(launched) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launched(f"{READY}ready()") as (launcher, pids):
            launcher.send_signal(signal.SIGHUP)
            launcher.send_signal(signal.SIGUSR1)
            _, _, err = end_of(launcher)
    finally:
        signal.signal(signal.SIGHUP, before)
    # The tasks ignore it too, and only the other signal has killed them.
    assert "killed by SIGUSR1" in err
    assert "SIGHUP" not in err
    assert not any(map(is_running, pids))


def test_reader_that_goes_away_ends_all(launched) -> None:
    text = f"{READY}sys.stdout.write(f'ready {{os.getpid()}}\\n')\nwhile True: print('more')"
    with launched(text, tasks=1) as (launcher, pids):
        launcher.stdout.close()
        launcher.wait(60)
        assert launcher.returncode == 1
        until(lambda: not any(map(is_running, pids)))
        assert "Traceback" not in launcher.stderr.read()


# Slow tasks of a launch.

RUNNING = ("worker 0", "worker 1", "worker 2")


class Run:
    """A run folder to which workers write, and a launcher that follows it."""

    def __init__(self, folder) -> None:
        self.slow = SlowTasks(folder)
        write(folder, run(*(process(task, 0, first_step(1, 1)) for task in RUNNING)))
        self._folder, self._step = folder / "events", 1
        self.now_s = 0.0

    def train(self, **group) -> list:
        """Trains for a little longer than a window; returns what was found."""
        num_steps = group.pop("num_steps", 60)
        for task, _, event in Group(num_workers=3, num_steps=num_steps, **group).lines():
            later = {name: getattr(event, name) for name in event.__dataclass_fields__}
            later |= {"step": event.step + self._step, "monotonic_s": self.now_s + event.step}
            (path,) = self._folder.glob(f"{task.replace(' ', '-')}.*")
            with path.open("a") as file:
                file.write(f"{encode(type(event)(**later))}\n")
        self._step += num_steps
        self.now_s += WINDOW_S + 1
        return self.slow.find(self.now_s, RUNNING)


SLOW = {"slow": 1, "cause": "input", "extra_s": 0.5}


def test_slow_task_is_reported_once_and_again_after_it_recovered(tmp_path) -> None:
    one = Run(tmp_path)
    found = [one.train(**SLOW) for _ in range(4)]
    assert [len(each) for each in found] == [0, 1, 0, 0]
    straggler = found[1][0]
    assert (straggler.task, straggler.cause.value) == ("worker 1", "input")
    assert 0.4 < straggler.late_s < straggler.step_s
    assert one.train() == []
    assert [len(one.train(**SLOW)) for _ in range(3)] == [0, 1, 0]


def test_task_that_does_not_run_is_no_straggler(tmp_path) -> None:
    one = Run(tmp_path)
    one.train(**SLOW)
    one.slow.find(one.now_s, ("worker 0", "worker 2"))
    assert one.slow.find(one.now_s + 2 * WINDOW_S, ("worker 0", "worker 2")) == []


def test_events_of_an_earlier_start_count_no_more(tmp_path) -> None:
    one = Run(tmp_path)
    one.train(**SLOW)
    one.slow.begin(one.now_s)
    assert one.slow.find(one.now_s + 2 * WINDOW_S, RUNNING) == []


def test_few_steps_are_waited_for(tmp_path) -> None:
    one = Run(tmp_path)
    assert [len(one.train(num_steps=3, **SLOW)) for _ in range(4)] == [0, 0, 0, 1]


# Launcher's events, read back by the goodput report.

FAILED = ExitStatus(name="worker 1", returncode=-9, at_s=1.0)
LEFT = ExitStatus(name="worker 0", returncode=42, at_s=1.0)


def recorded(folder) -> list:
    (launcher,) = [p for p in read_run(folder).processes if p.task == "launcher 0"]
    return list(launcher.events)


def test_failure_is_reported_once_a_start(tmp_path) -> None:
    with LaunchEvents(LaunchOptions(workers=3, ps=1, run_dir=tmp_path)) as events:
        for restart in (1, 2):
            events.failure(FAILED)
            events.failure(FAILED)
            events.restart(restart, FAILED)
        events.end(0)
    start, *between, end = recorded(tmp_path)
    assert isinstance(start, StartEvent)
    assert start.num_processes == 3
    assert [type(event) for event in between] == [FailureEvent, RestartEvent] * 2
    failure, restart = between[:2]
    assert failure.lost == "worker 1"
    assert failure.reason == "worker 1 failed first: killed by SIGKILL"
    assert (restart.attempt, restart.cause) == (1, "worker 1 failed (killed by SIGKILL)")
    assert isinstance(end, EndEvent)
    assert end.code == 0


def test_that_a_task_saved_and_left_is_no_failure(tmp_path) -> None:
    with LaunchEvents(LaunchOptions(run_dir=tmp_path)) as events:
        events.failure(LEFT)
        events.restart(1, LEFT)
        events.notice("SIGTERM to the launcher")
    _, restart, notice = recorded(tmp_path)
    assert restart.cause == "worker 0 saved and left (exit code 42)"
    assert isinstance(notice, NoticeEvent)


def test_error_of_the_launcher_is_its_end(tmp_path) -> None:
    with (
        pytest.raises(OSError, match="no more processes"),
        LaunchEvents(LaunchOptions(run_dir=tmp_path)),
    ):
        raise OSError("no more processes")
    end = recorded(tmp_path)[-1]
    assert (end.code, end.reason) == (1, "OSError('no more processes')")


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with LaunchEvents(LaunchOptions()) as events:
        events.failure(FAILED)
        events.notice("SIGTERM")
        events.restart(1, FAILED)
        events.end(0)
    assert list(tmp_path.iterdir()) == []
