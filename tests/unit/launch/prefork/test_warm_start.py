"""Tasks forked from a process that has loaded JAX behave like new processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratagem.launch.options import LaunchOptions
from stratagem.launch.plan import TaskPlan
from stratagem.launch.prefork import warm_start
from stratagem.launch.prefork.warm_start import WarmStart, can_fork
from stratagem.launch.restart import task_group
from stratagem.launch.restart.launcher import launch
from stratagem.launch.restart.task_group import TaskProcess
from tests.unit.launch.waiting import is_running, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux only")


def base_variables() -> dict[str, str]:
    plain = {name: text for name, text in os.environ.items() if not name.startswith("STRATAGEM_")}
    return {**plain, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def plan_of(path: Path | str, *args: str, **variables: str) -> TaskPlan:
    command = (sys.executable, str(path), *args)
    unbuffered = {"PYTHONUNBUFFERED": "1", **variables}
    return TaskPlan(task_type="worker", index=0, command=command, variables=unbuffered)


def make_ready(warm: WarmStart, plan: TaskPlan) -> None:
    warm.prepare(plan)
    until(lambda: warm.is_ready_for(plan))


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmStart]:
    with WarmStart(base_variables()) as warm:
        make_ready(warm, plan_of("x.py"))
        yield warm


@pytest.fixture
def forked(warm: WarmStart, tmp_path: Path) -> Iterator[Callable[..., TaskProcess]]:
    """Forks a task that runs a text as its script."""
    started: list[TaskProcess] = []

    def fork(text: str, *args: str, name: str = "script.py", **variables: str) -> TaskProcess:
        (tmp_path / name).write_text(text)
        plan = plan_of(tmp_path / name, *args, **variables)
        assert warm.is_ready_for(plan)
        started.append(TaskProcess(plan, base_variables(), warm))
        return started[-1]

    yield fork
    for process in started:
        process.send(signal.SIGKILL)
        process.wait()
        process.close()


def ended(process: TaskProcess) -> tuple[int, str, str]:
    until(lambda: process.returncode() is not None)
    out, err = (process.read_all(stream).decode() for stream in process.streams)
    code = process.returncode()
    assert code is not None
    return code, out, err


SHOWS = """from __future__ import annotations
import atexit, faulthandler, json, os, pickle, random, sys
import beside, jax, numpy
def function(): return 3
atexit.register(lambda: print("at exit", os.environ.get("TF_CONFIG")))
assert pickle.loads(pickle.dumps(function)) is sys.modules["__main__"].function is function
facts = {
    "main": [__name__, __file__, sys.argv, sys.path[0], beside.word, os.getcwd()],
    "leads": os.getpid() == os.getsid(0) == os.getpgid(0),
    "stdin": sys.stdin.read(),
    "backend": os.environ["KERAS_BACKEND"],
    "devices": len(jax.devices()),
    "faulthandler": faulthandler.is_enabled(),
}
print(json.dumps([facts, random.random(), numpy.random.random()]))
"""


def test_task_is_like_a_new_process_with_variables_of_its_own(forked, tmp_path) -> None:
    """XLA reads its flags when a backend starts, which none has where tasks are forked."""
    (tmp_path / "beside.py").write_text("word = 'found'")
    path, flags = str(tmp_path / "script.py"), "--xla_force_host_platform_device_count=3"
    first = forked(SHOWS, "--epochs", "3", XLA_FLAGS=flags, TF_CONFIG="{}")
    second = forked(SHOWS, "--epochs", "3", XLA_FLAGS=flags)
    drawn: list[float] = []
    for process, config in ((first, "{}"), (second, None)):
        code, out, err = ended(process)
        assert code == 0, err
        shown, last = out.splitlines()
        facts, *numbers = json.loads(shown)
        own = [path, "--epochs", "3"]
        assert facts == {
            "main": ["__main__", path, own, str(tmp_path), "found", os.getcwd()],
            "leads": True,
            "stdin": "",
            "backend": "jax",
            "devices": 3,
            "faulthandler": False,
        }
        assert last == f"at exit {config}"
        drawn += numbers
    assert len(set(drawn)) == 4


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(4)", 4),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
    ],
)
def test_end_is_reported_as_it_was(forked, last, code) -> None:
    assert ended(forked(f"print('here')\n{last}")) == (code, "here\n", "")


def test_error_is_reported_from_the_script_on(forked, tmp_path) -> None:
    code, _, err = ended(forked("def f():\n    raise ValueError('nan')\nf()"))
    assert code == 1
    assert err.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path / "script.py"}", line 3, in <module>',
    ]
    assert err.endswith("ValueError: nan\n")


def test_task_has_a_group_of_its_own_before_it_is_known(forked) -> None:
    """A signal to the group would be lost else."""
    process = forked("import time\ntime.sleep(1000)")
    assert os.getpgid(process.group) == os.getsid(process.group) == process.group
    process.send(signal.SIGTERM)
    assert ended(process)[0] == -signal.SIGTERM


def test_task_starts_processes_that_find_its_script(forked) -> None:
    text = """import multiprocessing
def function(number): return number + 1
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(function, [1, 2]))
"""
    assert ended(forked(text)) == (0, "[2, 3]\n", "")


def test_task_saves_and_restores(forked, tmp_path) -> None:
    """Orbax brings threads and an event loop of its own."""
    text = """import sys
import stratagem as sg
import keras
with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
path = sg.train.Checkpoint(model=model).save(sys.argv[1])
before = model.get_weights()[0]
model.layers[0].kernel.assign(before * 0)
sg.train.Checkpoint(model=model).restore(path)
print((model.get_weights()[0] == before).all())
"""
    code, out, err = ended(forked(text, str(tmp_path / "saved")))
    assert (code, out) == (0, "True\n"), err


@pytest.mark.slow
def test_setting_that_comes_too_late_is_reported(forked, tmp_path) -> None:
    (tmp_path / "settings.py").write_text("import os\nos.environ['JAX_ENABLE_X64'] = '1'")
    text = "import settings\nimport stratagem as sg\nsg.MirroredStrategy()"
    code, _, err = ended(forked(text))
    assert code == 1
    assert "RuntimeError: The program sets JAX_ENABLE_X64 to '1', but the launcher" in err


def test_task_with_other_settings_is_started_anew(warm, tmp_path) -> None:
    plan = plan_of(tmp_path / "x.py", JAX_PLATFORMS="")
    assert not warm.is_ready_for(plan)
    assert warm.start(plan, {}) is None


@pytest.mark.slow
def test_tasks_die_with_what_they_are_forked_from(tmp_path) -> None:
    """And later ones are started anew."""
    (tmp_path / "wait.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(1000)")
    plan = plan_of(tmp_path / "wait.py")
    with WarmStart(base_variables()) as warm:
        assert warm.start(plan, {}) is None  # nothing is loaded yet
        make_ready(warm, plan)
        process = TaskProcess(plan, base_variables(), warm)
        until(lambda: process.read(process.streams[0]))
        warm.close()
        until(lambda: not is_running(process.group))
        assert process.returncode() == -9
        process.wait()
        process.close()
        assert warm.start(plan, {}) is None


@pytest.mark.slow
def test_server_that_does_not_reply_is_abandoned_but_its_forks_go_on(tmp_path, monkeypatch) -> None:
    text = "import os, time\nprint(os.getppid(), flush=True)\ntime.sleep(1000)"
    (tmp_path / "parent.py").write_text(text)
    plan = plan_of(tmp_path / "parent.py")
    with WarmStart(base_variables()) as warm:
        make_ready(warm, plan)
        process = TaskProcess(plan, base_variables(), warm)
        server = int(first_line(process))
        os.kill(server, signal.SIGSTOP)
        monkeypatch.setattr(warm_start, "_REPLY_S", 0.1)
        assert warm.start(plan, {}) is None
        os.kill(server, signal.SIGCONT)
        assert not warm.is_ready_for(plan)
        assert warm.start(plan, {}) is None
        assert is_running(server)
        assert is_running(process.group)
        warm.close()
        until(lambda: not is_running(server) and not is_running(process.group))
        process.wait()
        process.close()


def first_line(process: TaskProcess) -> str:
    found = b""

    def has_come() -> bool:
        nonlocal found
        found += process.read(process.streams[0]) or b""
        return found.endswith(b"\n")

    until(has_come)
    return found.decode()


SCRIPT = "import stratagem as sg\n"


@pytest.mark.parametrize(
    ("name", "text", "variables", "can"),
    [
        ("train.py", SCRIPT, {}, True),
        ("train.py", "from keras import layers", {"KERAS_BACKEND": "jax"}, True),
        ("train.py", SCRIPT, {"KERAS_BACKEND": "torch"}, False),
        ("train.py", "print('nothing of it')", {}, False),
        ("train.py", f"import os\nos.environ['JAX_ENABLE_X64'] = '1'\n{SCRIPT}", {}, False),
        ("train.py", f"import os\nprint(os.environ['JAX_ENABLE_X64'])\n{SCRIPT}", {}, True),
        ("train", SCRIPT, {}, False),
        ("train.py", None, {}, False),
    ],
)
def test_only_scripts_that_do_not_notice_are_forked(tmp_path, name, text, variables, can) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert can_fork([sys.executable, str(path)], variables) is can
    assert not can_fork(["other-python", str(path)], variables)
    assert not can_fork([sys.executable, "-m", str(path)], variables)


RESTARTED = """
import sys, time
from pathlib import Path
loaded = "jax" in sys.modules
print("loaded" if loaded else "anew")
import stratagem
starts = Path(f"starts-{'loaded' if loaded else 'anew'}")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if not loaded and len(starts.read_text()) == 1:
    while not Path("ready").exists():
        time.sleep(0.01)
    import signal
    signal.raise_signal(signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("last", "cold", "printed"),
    [
        pytest.param("", False, ["anew", "loaded"], marks=pytest.mark.slow),
        ("", True, ["anew", "anew"]),
        # A program that fails by itself may do so because it was forked.
        pytest.param(
            "if loaded: raise ValueError", False, ["anew", "loaded", "anew"], marks=pytest.mark.slow
        ),
    ],
)
def test_restarted_tasks_are_forked(folder, monkeypatch, capfd, last, cold, printed) -> None:
    prepare = WarmStart.prepare

    def prepare_all(warm: WarmStart, plan: TaskPlan) -> None:
        """The task waits until it is done."""
        if not (folder / "ready").exists():
            monkeypatch.setattr(WarmStart, "prepare", prepare)
            make_ready(warm, plan)
            (folder / "ready").touch()

    monkeypatch.setattr(task_group, "WARM_UP_AFTER_S", 0.0)
    monkeypatch.setattr(WarmStart, "prepare", prepare_all)
    if cold:
        (folder / "ready").touch()
    (folder / "train.py").write_text(RESTARTED + last)
    options = LaunchOptions(max_restarts=2, cold_restarts=cold)
    outcome = launch([sys.executable, "train.py"], options)
    assert outcome.exit_code == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"[worker 0] {word}" for word in printed]


FIRST = """
import sys
loaded = "jax" in sys.modules
import os, stratagem
print("loaded" if loaded else "anew", os.environ.get("KERAS_HOME", "-"))
"""


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        # One process loads JAX for all, where all are to be forked after a failure anyway.
        pytest.param(
            LaunchOptions(workers=2, max_restarts=1), {"loaded -"}, marks=pytest.mark.slow
        ),
        (LaunchOptions(workers=2, max_restarts=1, cold_restarts=True), {"anew -"}),
        (LaunchOptions(workers=2), {"anew -"}),
        (LaunchOptions(max_restarts=1), {"anew -"}),
    ],
)
def test_tasks_that_start_together_are_forked(folder, capfd, options, printed) -> None:
    (folder / "train.py").write_text(FIRST)
    assert launch([sys.executable, "train.py"], options).exit_code == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == options.workers
    assert {line.partition("] ")[2] for line in lines} == printed


def test_tasks_that_load_with_other_variables_start_anew(folder, capfd) -> None:
    def finish(plan: TaskPlan) -> TaskPlan:
        own = {**plan.variables, "KERAS_HOME": plan.name}
        return dataclasses.replace(plan, variables=own)

    (folder / "train.py").write_text(FIRST)
    options = LaunchOptions(workers=2, max_restarts=1)
    assert launch([sys.executable, "train.py"], options, finish=finish).exit_code == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[worker 0] anew worker 0",
        "[worker 1] anew worker 1",
    ]


@pytest.mark.slow
def test_script_is_named_as_python_names_it(folder, capfd) -> None:
    """Absolute in `__file__` and in tracebacks, and as it was given in `sys.argv`."""
    lines = "import sys, stratagem, traceback\nprint(__file__, sys.argv)\ntraceback.print_stack()"
    (folder / "train.py").write_text(lines)
    printed = []
    for cold in (False, True):
        options = LaunchOptions(workers=2, max_restarts=1, cold_restarts=cold)
        assert launch([sys.executable, "train.py"], options).exit_code == 0
        out, err = capfd.readouterr()
        assert f"{folder / 'train.py'} ['train.py']" in out
        printed.append(sorted(line for line in err.splitlines() if "train.py" in line))
    assert printed[0] == printed[1]
    assert len(printed[0]) == 2


@pytest.mark.slow
def test_loading_is_given_up_when_the_launcher_is_to_end() -> None:
    with WarmStart(base_variables()) as warm:
        plan = plan_of("x.py")
        warm.load([plan, plan], lambda: True)
        assert not warm.is_ready_for(plan)
        warm.load([plan, plan], lambda: False)
        assert warm.is_ready_for(plan)
