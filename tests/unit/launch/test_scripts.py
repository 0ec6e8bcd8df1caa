"""`run`: real processes, from first line to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

import stratagem as sg
from stratagem.launch.options import LaunchOptions
from stratagem.launch.restart import policy, running_tasks, task_group
from stratagem.launch.restart.launcher import launch
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


def test_task_that_a_signal_kills_is_named_with_it(script) -> None:
    path = script(
        f"""
        if task["type"] == "ps":
            os.kill(os.getpid(), 9)
        {WAIT}"""
    )
    with pytest.raises(RuntimeError, match="ps 0 failed first of 2 tasks: killed by SIGKILL"):
        sg.launch.run(path, ps=1)


def test_task_that_lost_its_peer_is_not_the_cause(script, folder, monkeypatch) -> None:
    """Worker 0 has ended before worker 1 fails, so that only its words can tell."""
    monkeypatch.setattr(policy, "SETTLE_S", 1000.0)
    path = script(
        f"""{AFTER}
if task["index"] == 0:
    from stratagem.errors import UnavailableError
    say_pid("first")
    raise UnavailableError("worker 1 is gone")
if task["index"] == 1:
    wait_for("first")
    raise ValueError("the cause")
{WAIT}"""
    )
    with pytest.raises(RuntimeError, match="worker 1 failed first of 3") as caught:
        sg.launch.run(path, workers=3)
    assert str(caught.value.__cause__).endswith("ValueError: the cause")


def test_task_that_does_not_stop_is_killed(capfd, script) -> None:
    path = script(
        f"""{AFTER}
import signal
from pathlib import Path
if task["index"] == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(sys.argv[1]).write_text("ready")
    {WAIT}
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
raise SystemExit(7)
"""
    )
    ready = path.replace("task_script.py", "ready")
    with pytest.raises(RuntimeError, match="worker 1 failed first of 2 tasks: exit code 7"):
        sg.launch.run(path, [ready], workers=2, grace_s=0.01)
    assert "Stopped: worker 0 (killed by SIGKILL)." in capfd.readouterr().err


def test_servers_end_with_the_workers_and_the_evaluator_goes_on(script, folder) -> None:
    path = script(
        f"""{AFTER}{SELF}
if task["type"] == "worker":
    while not Path("ps-0").exists():  # once the workers have ended, it may not come that far
        time.sleep(0.01)
    say_pid(name)
elif task["type"] == "ps":
    say_pid(name)
    {WAIT}
else:
    wait_for("worker-0"), wait_for("worker-1"), wait_for("ps-0")
    Path("evaluated").write_text("last")
"""
    )
    sg.launch.run(path, workers=2, ps=1, evaluator=True)
    assert (folder / "evaluated").read_text() == "last"
    assert not is_running(number_in(folder / "ps-0"))


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


def test_evaluator_that_goes_on_too_long_is_stopped(script) -> None:
    path = script(f'if task["type"] != "worker":\n    {WAIT}')
    outcome = launch([sys.executable, path], LaunchOptions(evaluator=True, evaluator_grace_s=0.0))
    assert [end.returncode for end in outcome.statuses] == [0, -signal.SIGTERM]
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


def test_leader_alone_is_shown_and_all_is_kept(capfd, script, folder) -> None:
    path = script('print("here is", task["index"])')
    sg.launch.run(path, workers=3, show="leader", log_dir="logs")
    assert capfd.readouterr().out == "[worker 0] here is 0\n"
    logs = {path.name: path.read_text() for path in (folder / "logs").iterdir()}
    assert logs == {f"worker-{i}.log": f"here is {i}\n" for i in range(3)}


def test_failure_of_a_task_that_is_not_shown_is_reported(capfd, script) -> None:
    path = script('assert task["index"] == 0, "not here"')
    with pytest.raises(RuntimeError, match="worker 1 failed first"):
        sg.launch.run(path, workers=2, show="leader")
    out, err = capfd.readouterr()
    assert out == ""
    assert "[launch]     AssertionError: not here\n" in err
    assert "[worker 1]" not in err


def test_much_output_is_whole(capfd, script) -> None:
    path = script("for i in range(20_000): sys.stdout.write(f'{i:07} ' + 'x' * 50 + '\\n')")
    sg.launch.run(path, workers=2)
    lines = capfd.readouterr().out.splitlines()
    for index in range(2):
        own = [line for line in lines if line.startswith(f"[worker {index}] ")]
        assert own == [f"[worker {index}] {i:07} " + "x" * 50 for i in range(20_000)]


def test_log_that_cannot_be_written_leaves_no_process(script, folder, monkeypatch) -> None:
    started = []
    process = running_tasks.TaskProcess

    def start(plan, base, warm):
        started.append(process(plan, base, warm))
        # The next task's file cannot be made.
        (folder / "logs" / "worker-1.log").mkdir()
        return started[-1]

    monkeypatch.setattr(running_tasks, "TaskProcess", start)
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


def test_gpus_are_dealt_to_real_tasks(capfd, script, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    path = script('print(os.environ["CUDA_VISIBLE_DEVICES"])')
    sg.launch.run(path, workers=2, devices_per_worker=1)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[worker 0] 3", "[worker 1] 1"]
    with pytest.raises(ValueError, match="need 4 GPUs, but there are 3: 3,1,2"):
        sg.launch.run(path, workers=2, devices_per_worker=2)


def test_last_words_without_an_end_of_line_are_reported_too(capfd, script) -> None:
    path = script("sys.stderr.write('out of memory'); sys.stderr.flush(); os.kill(os.getpid(), 9)")
    with pytest.raises(RuntimeError, match="killed by SIGKILL") as caught:
        sg.launch.run(path)
    assert str(caught.value.__cause__) == "\nout of memory"
    assert "[launch]     out of memory\n" in capfd.readouterr().err


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
        assert launcher.stdout is not None
        assert sorted(launcher.stdout.readline() for _ in range(2)) == [
            "[worker 0] ready\n",
            "[worker 1] ready\n",
        ]
        launcher.send_signal(signum)
        assert launcher.communicate(timeout=60)[0] == printed
    assert launcher.returncode == code


def test_launcher_loads_no_jax(script) -> None:
    program = (
        "import sys, stratagem as sg; sg.launch.run(sys.argv[1], workers=2); "
        "print(sorted({'jax', 'keras', 'numpy'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, script("")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ended.stdout == "[]\n"
