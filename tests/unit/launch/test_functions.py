"""`spawn`: functions in real tasks, their values and errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

import stratagem as sg
from tests.unit.launch import task_functions


class Stubborn:
    """It raises what nobody expects when it is pickled."""

    def __reduce__(self):
        raise ZeroDivisionError("not me")


def test_each_worker_s_value_comes_back_in_order() -> None:
    values = sg.launch.spawn(
        task_functions.place, (1, "a"), {"key": [2]}, workers=2, chief=True, ps=1
    )
    assert [value[:2] for value in values] == [("chief", 0), ("worker", 0), ("worker", 1)]
    assert [value[2:4] for value in values] == [((1, "a"), {"key": [2]})] * 3
    assert len({os.getpid(), *(value[4] for value in values)}) == 4


def test_exception_comes_back_with_the_traceback_of_its_task() -> None:
    with pytest.raises(LookupError) as caught:
        sg.launch.spawn(task_functions.fail_in_worker_1, ("exception",), workers=3)
    assert caught.value.args == ("no such example", 7)
    cause = caught.value.__cause__
    assert isinstance(cause, sg.launch.RemoteError)
    lines = str(cause).splitlines()
    assert lines[:3] == ["", "[worker 1]", "Traceback (most recent call last):"]
    assert any(f'"{task_functions.__file__}"' in line for line in lines)
    assert lines[-1] == "LookupError: ('no such example', 7)"


@pytest.mark.parametrize(
    ("kind", "how", "last"),
    [
        ("unsendable", "exit code 1", "tests.unit.launch.task_functions.UnsendableError: ab"),
        ("exit", "exit code 3", "[worker 1]"),
        ("kill", "killed by SIGKILL", "[worker 1]"),
    ],
)
def test_task_without_an_exception_to_raise_is_named(kind, how, last) -> None:
    with pytest.raises(RuntimeError, match=f"worker 1 failed first of 2 tasks: {how}") as caught:
        sg.launch.spawn(task_functions.fail_in_worker_1, (kind,), workers=2)
    assert str(caught.value.__cause__).splitlines()[-1] == last


def test_value_that_cannot_be_sent_back_is_named() -> None:
    with pytest.raises(TypeError, match="returned a function that cannot be sent back") as caught:
        sg.launch.spawn(task_functions.unsendable_value)
    assert "Fix: return arrays and plain Python values." in str(caught.value)


def test_answers_are_those_of_the_last_start() -> None:
    values = sg.launch.spawn(task_functions.succeed_at_restart, (2,), workers=2, max_restarts=2)
    assert values == [2, 2]
    with pytest.raises(ValueError, match=r"^attempt 1$"):
        sg.launch.spawn(task_functions.succeed_at_restart, (2,), max_restarts=1)
    with pytest.raises(RuntimeError, match="worker 0 failed first of 1 tasks: killed by SIGKILL"):
        sg.launch.spawn(task_functions.raise_and_then_die, max_restarts=1)


@pytest.mark.parametrize(
    ("fn", "args", "words"),
    [
        (len, (threading.Lock(),), "Argument 0 of len, of type lock, cannot be sent"),
        (len, (Stubborn(),), "of type Stubborn, cannot be sent to another process: not me"),
        (3, (), "fn=3 is of type int(?s:.)*spawn\\(train"),
    ],
)
def test_what_cannot_be_sent_is_named(fn, args, words) -> None:
    with pytest.raises(TypeError, match=words):
        sg.launch.spawn(fn, args)


def test_function_needs_no_jax_in_its_task() -> None:
    heavy = ("jax", "keras", "numpy", "pytest")
    assert sg.launch.spawn(task_functions.loaded, heavy) == [[]]


MAIN = """
import stratagem as sg
class Result:
    def __init__(self, value):
        self.value = value
def work(number):
    import __main__
    return Result(number + 1), __name__, __main__.__file__ == __file__
class WorkError(Exception):
    pass
def fail():
    raise WorkError("here")
if __name__ == "__main__":
    for result, name, is_main in sg.launch.spawn(work, (4,), workers=2):
        print(type(result) is Result, result.value, name, is_main)
    try:
        sg.launch.spawn(fail)
    except WorkError as error:
        print("caught", error)
"""


def run_script(path, folder, program=None) -> subprocess.CompletedProcess:
    command = [sys.executable, path]
    return subprocess.run(
        command, input=program, capture_output=True, text=True, cwd=folder, timeout=60, check=False
    )


def test_function_of_a_script_is_found_in_the_script(folder) -> None:
    (folder / "main.py").write_text(MAIN)
    ended = run_script("main.py", folder)
    assert ended.returncode == 0, ended.stderr
    line = "True 5 __mp_main__ True"
    assert ended.stdout.splitlines() == [line, line, "caught here"]


def test_task_may_start_tasks_of_its_own() -> None:
    assert sg.launch.spawn(sg.launch.spawn, (task_functions.leave_well,)) == [[None]]


UNGUARDED = (
    MAIN.split("if __name__")[0]
    + """
import pathlib
pathlib.Path("runs").open("a").write("x")
for result, name, _ in sg.launch.spawn(work, (4,), workers=2):
    print(type(result) is Result, result.value, name)
try:
    sg.launch.spawn(fail)
except WorkError as error:
    print("caught", error)
print(sg.launch.spawn(lambda: WorkError.__name__))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "prompt"])
def test_function_of_a_program_without_a_guard_is_sent_by_value(folder, how) -> None:
    """The tasks do not run the program: each would start tasks of its own."""
    (folder / "main.py").write_text(UNGUARDED)
    path, program = ("main.py", None) if how == "script" else ("-", UNGUARDED)
    ended = run_script(path, folder, program)
    assert ended.returncode == 0, ended.stderr
    line = "True 5 __main__"
    assert ended.stdout.splitlines() == [line, line, "caught here", "['WorkError']"]
    assert (folder / "runs").read_text() == "x"


def test_script_that_spawns_before_its_guard_and_in_it_is_stopped(folder) -> None:
    """The call under the guard imports the script, and the first one would start more tasks."""
    first, guarded = MAIN.split("if __name__")
    program = f"{first}sg.launch.spawn(work, (1,))\nif __name__{guarded}"
    (folder / "main.py").write_text(program)
    ended = run_script("main.py", folder)
    assert ended.returncode == 1
    assert "A task called spawn while it was loading its script." in ended.stderr
    assert 'if __name__ == "__main__":' in ended.stderr


@pytest.mark.slow
def test_interrupt_ends_a_task_that_ignores_it(folder) -> None:
    """The stop button of a notebook is pressed once."""
    (folder / "main.py").write_text(IGNORES)
    ended = run_script("main.py", folder)
    assert ended.stdout.splitlines() == ["interrupted"], ended.stderr
    for worker in ("0", "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((folder / worker).read_text()), 0)


IGNORES = """
import json, os, pathlib, signal, threading, time
import stratagem as sg
def work():
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    if task["index"] == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    path = pathlib.Path(str(task["index"]))
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    time.sleep(1000)
def press():
    while not (pathlib.Path("0").exists() and pathlib.Path("1").exists()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press, daemon=True).start()
try:
    sg.launch.spawn(work, workers=2, grace_s=0.2)
except KeyboardInterrupt:
    print("interrupted")
"""
