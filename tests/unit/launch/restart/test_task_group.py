"""Signals to a launcher in a separate process, and its sudden end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from stratagem.observe.run_events.reader import read_run
from tests.unit.launch.waiting import is_running, number_in, until

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
    with launched(f"{READY}signal.signal(signal.SIGINT, signal.SIG_DFL)\nready()") as (
        launcher,
        pids,
    ):
        launcher.send_signal(signum)
        code, _, err = end_of(launcher)
    assert code == 128 + signum
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


def test_tasks_that_save_and_leave_well_make_a_good_end(launched, folder) -> None:
    text = f"""{READY}
def save(signum, frame):
    open(f"saved-{{task['index']}}", "w").close()
    raise SystemExit(0)
signal.signal(signal.SIGTERM, save)
ready()
"""
    with launched(text, "--max-restarts", "3") as (launcher, _):
        launcher.send_signal(signal.SIGTERM)
        code, _, err = end_of(launcher)
    assert code == 0
    assert "Ended after SIGTERM: worker 0 (exit code 0), worker 1 (exit code 0).\n" in err
    assert sorted(path.name for path in folder.glob("saved-*")) == ["saved-0", "saved-1"]


def test_signal_after_which_tasks_save_and_leave_ends_all_with_their_code(launched) -> None:
    text = f"""{READY}
def leave(signum, frame):
    raise SystemExit(42)
signal.signal(signal.SIGTERM, leave)
ready()
"""
    with launched(text, "--max-restarts", "3") as (launcher, _):
        launcher.send_signal(signal.SIGTERM)
        code, out, err = end_of(launcher)
    assert code == 42
    assert "ready" not in out
    assert "Ended after SIGTERM: worker 0 (exit code 42), worker 1 (exit code 42).\n" in err
    assert "again" not in err


def test_signal_is_written_into_the_folder_of_the_run(launched, folder) -> None:
    with launched(f"{READY}ready()", "--run-dir", "run", tasks=1) as (launcher, _):
        launcher.send_signal(signal.SIGTERM)
        code, _, _ = end_of(launcher)
    (process,) = read_run(folder / "run").processes
    _, notice, end = process.events
    assert (notice.reason, end.code) == ("SIGTERM to the launcher", code)


def test_nothing_is_started_again_after_a_signal(launched) -> None:
    with launched(f"{READY}ready()", "--max-restarts", "3") as (launcher, _):
        launcher.send_signal(signal.SIGTERM)
        code, out, err = end_of(launcher)
    assert code == 128 + signal.SIGTERM
    assert "ready" not in out
    assert "restart" not in err


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


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGQUIT])
def test_launcher_that_dies_at_once_leaves_nothing(launched, folder, signum) -> None:
    with launched(GRANDCHILD, tasks=1) as (launcher, pids):
        grandchild = number_in(folder / "child")
        assert is_running(grandchild)
        launcher.send_signal(signum)
        launcher.wait(60)
        until(lambda: not any(map(is_running, [*pids, grandchild])))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_children_of_tasks_end_with_them(launched, folder, signum) -> None:
    with launched(GRANDCHILD, tasks=1) as (launcher, pids):
        launcher.send_signal(signum)
        end_of(launcher)
        assert not any(map(is_running, [*pids, number_in(folder / "child")]))


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
