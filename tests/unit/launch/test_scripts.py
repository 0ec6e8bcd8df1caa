"""`run`: real processes, from first line to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

import stratagem as sg
from stratagem.launch.options import LaunchOptions
from stratagem.launch.restart import task_group
from stratagem.launch.restart.launcher import launch
from tests.fresh_process import run_fresh
from tests.unit.launch.waiting import is_running, number_in

WAIT = "import time; time.sleep(1000)\n"
# What the others of a task are there for: one has failed, or all is done.
SELF = "name = f\"{task['type']}-{task['index']}\"\n"
# Waits until another process, whose number is in a file, has ended.
AFTER = """
import time
from pathlib import Path
def is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
def wait_for(name):
    path = Path(name)
    while not (path.exists() and path.read_text().endswith("\\n")):
        time.sleep(0.01)
    while is_running(int(path.read_text())):
        time.sleep(0.01)
def say_pid(name):
    Path(name).write_text(f"{os.getpid()}\\n")
"""


def test_every_task_prints_its_place_behind_its_name(capfd, script) -> None:
    path = script("print('I am', task['type'], task['index'], sys.argv[1:])")
    sg.launch.run(path, ["--epochs", "3"], workers=2, chief=True, evaluator=True)
    out, err = capfd.readouterr()
    names = ("chief 0", "worker 0", "worker 1", "evaluator 0")
    assert sorted(out.splitlines()) == sorted(
        f"[{name}] I am {name} ['--epochs', '3']" for name in names
    )
    assert err == ""


def test_module_and_program_run_too(capfd, folder) -> None:
    (folder / "tool.py").write_text("print('module')")
    sg.launch.run("tool", module=True)
    sg.launch.run("echo", ["a", "b"])
    assert capfd.readouterr() == ("[worker 0] module\n[worker 0] a b\n", "")


def test_first_failure_is_raised_with_its_own_traceback(capfd, script) -> None:
    path = script(
        f"""
        if task["index"] == 1:
            raise ValueError("loss is nan")
        {WAIT}"""
    )
    with pytest.raises(
        RuntimeError,
        match=r"worker 1 failed first of 3 tasks: exit code 1\.(?s:.)*with exit code 0",
    ) as caught:
        sg.launch.run(path, workers=3)
    cause = str(caught.value.__cause__)
    assert "\nTraceback (most recent call last):\n" in cause
    assert f'File "{path}", line ' in cause
    assert cause.endswith("ValueError: loss is nan")
    err = capfd.readouterr().err
    assert "[launch] worker 1 failed (exit code 1): stopping the others.\n" in err
    assert "[launch]     ValueError: loss is nan\n" in err
    assert "[launch] Stopped: worker 0 (killed by SIGTERM), worker 2 (killed by SIGTERM).\n" in err


def test_server_that_fails_when_the_work_is_done_fails_nothing(script, folder, monkeypatch) -> None:
    """It loses its workers before it is told to end: here it is never told."""
    monkeypatch.setattr(task_group, "tasks_to_stop", lambda *_, **__: [])
    path = script(
        f"""{AFTER}
if task["type"] == "worker":
    say_pid("worker")
else:
    wait_for("worker")
    raise ConnectionResetError
"""
    )
    outcome = launch([sys.executable, path], LaunchOptions(ps=1))
    assert [end.returncode for end in outcome.statuses] == [0, 1]
    assert outcome.exit_code == 0


GRANDCHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", {program!r}])
"""
IGNORES = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "open('child', 'w').write(f'{os.getpid()}\\n'); time.sleep(1000)"
)


@pytest.mark.parametrize("how", ["pass", "os.kill(os.getpid(), 9)"])
def test_what_a_task_leaves_running_goes_with_it(script, folder, how) -> None:
    head = f"{AFTER}{GRANDCHILD.format(program=IGNORES)}"
    path = script(f"{head}\nwhile not Path('child').exists():\n    time.sleep(0.01)\n{how}\n")
    outcome = launch([sys.executable, path], LaunchOptions(grace_s=0.0))
    assert not is_running(number_in(folder / "child"))
    assert (outcome.exit_code == 0) is (how == "pass")


def test_what_a_task_leaves_running_may_end_its_work(script, folder) -> None:
    """As a shell's child when the shell is stopped: it is told to end, and has time for it."""
    program = (
        "import os, signal, sys, time\n"
        "def save(signum, frame): time.sleep(0.05); open('saved', 'w').close(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open('child', 'w').write(f'{os.getpid()}\\n'); time.sleep(1000)"
    )
    head = f"{AFTER}{GRANDCHILD.format(program=program)}"
    path = script(f"{head}\nwhile not Path('child').exists():\n    time.sleep(0.01)\n")
    sg.launch.run(path)
    assert (folder / "saved").exists()
    assert not is_running(number_in(folder / "child"))


def test_leader_alone_is_shown_and_all_is_kept_and_reported(capfd, script, folder) -> None:
    path = script(
        f"""{AFTER}
if task["index"] == 0:
    say_pid("leader")
else:
    wait_for("leader")
print("here is", task["index"], flush=True)
assert task["index"] != 1, "not here"
"""
    )
    with pytest.raises(RuntimeError, match="worker 1 failed first"):
        sg.launch.run(path, workers=2, show="leader", log_dir="logs")
    out, err = capfd.readouterr()
    assert out == "[worker 0] here is 0\n"
    assert "[launch]     AssertionError: not here\n" in err
    assert "[worker 1]" not in err
    log = (folder / "logs" / "worker-1.log").read_text()
    assert log.startswith("here is 1\nTraceback (most recent call last):\n")


def test_much_output_is_whole(capfd, script) -> None:
    path = script("for i in range(20_000): sys.stdout.write(f'{i:07} ' + 'x' * 50 + '\\n')")
    sg.launch.run(path, workers=2)
    lines = capfd.readouterr().out.splitlines()
    for index in range(2):
        own = [line for line in lines if line.startswith(f"[worker {index}] ")]
        assert own == [f"[worker {index}] {i:07} " + "x" * 50 for i in range(20_000)]


def test_log_that_cannot_be_written_leaves_no_process(script, folder, monkeypatch) -> None:
    started = []
    process = task_group.TaskProcess

    def start(*arguments):
        started.append(process(*arguments))
        # The next task's file cannot be made.
        (folder / "logs" / "worker-1.log").mkdir()
        return started[-1]

    monkeypatch.setattr(task_group, "TaskProcess", start)
    with pytest.raises(IsADirectoryError):
        sg.launch.run(script(WAIT), workers=2, log_dir=folder / "logs")
    assert [one.returncode() for one in started] == [-signal.SIGKILL]


def test_run_in_another_thread_works_without_signals(capfd, script) -> None:
    path = script("print('here')")
    thread = threading.Thread(target=sg.launch.run, args=(path,))
    thread.start()
    thread.join()
    assert capfd.readouterr() == ("[worker 0] here\n", "")


def test_tasks_read_nothing_from_the_terminal(capfd, script) -> None:
    sg.launch.run(script("print(repr(sys.stdin.read()))"))
    assert capfd.readouterr().out == "[worker 0] ''\n"


@pytest.mark.parametrize(
    ("signum", "code", "printed"),
    [(signal.SIGTERM, -signal.SIGTERM, ""), (signal.SIGINT, 0, "interrupted\n")],
)
def test_signal_goes_on_to_the_program_that_calls(script, signum, code, printed) -> None:
    program = (
        "import sys, stratagem as sg\n"
        "try:\n    sg.launch.run(sys.argv[1], workers=2)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    # Whatever comes, the tasks leave well: it is the program that is to end.
    path = script(
        """
        import signal
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: sys.exit())
        sys.stdout.write("ready\\n")
        signal.pause()
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as launcher:
        assert sorted(launcher.stdout.readline() for _ in range(2)) == [
            "[worker 0] ready\n",
            "[worker 1] ready\n",
        ]
        launcher.send_signal(signum)
        assert launcher.communicate(timeout=60)[0] == printed
    assert launcher.returncode == code


def test_launcher_loads_no_jax(script) -> None:
    program = (
        f"import sys, stratagem as sg; sg.launch.run({script('')!r}, workers=2); "
        "print(sorted({'jax', 'keras', 'numpy'} & set(sys.modules)))"
    )
    assert run_fresh(program) == ["[]"]
