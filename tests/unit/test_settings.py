"""The table of settings: names, variables, kinds, and what comes from them."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem import resources as module
from stratagem import settings
from stratagem.launch.options import LaunchOptions
from stratagem.resources import (
    Closing,
    TemporaryFolder,
    available_cores,
    checked_folder,
    remove_abandoned_folders,
)
from stratagem.settings import SETTINGS, Kind, Setting, choice
from tests.fresh_process import run_fresh

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "environment.md"
OF_LIBRARY = [setting for setting in SETTINGS.values() if setting.meaning]
OF_LAUNCH = [setting for setting in SETTINGS.values() if setting.is_option]


def name_of(setting: Setting) -> str:
    return setting.name


def texts_of(kind: Kind) -> dict[str, object]:
    """Valid texts of a kind, and their values."""
    if kind.type is bool:
        on, off = ("1", "true", "True", "YES", "on"), ("0", "false", "No", "OFF", "")
        return dict.fromkeys(on, True) | dict.fromkeys(off, False)
    if kind.type is int:
        return {"1": 1, "1000": 1000}
    if kind.type == int | float:
        return {"7.5": 7.5, "3": 3.0, "1e3": 1000.0}
    if "enum" in kind.limits:
        return {word: word.lower() for word in kind.limits["enum"]}
    return {"": "", " a B ": " a B "}


def wrong_texts_of(kind: Kind) -> dict[str, str]:
    """Wrong texts of a kind, and what the message says is expected."""
    if kind.type is bool:
        return dict.fromkeys(("2", "maybe", " 1"), "1, true, yes, on, or 0, false, no, off.")
    if kind.type is int:
        least = kind.limits["minimum"]
        texts = ("", "-1", "2.5", "many", *(["0"] if least else []))
        return dict.fromkeys(texts, f"an integer of at least {least}.")
    if kind.type == int | float:
        texts = ("", "-1", "0", "nan", "inf", "soon")
        return dict.fromkeys(texts, "a number of seconds above 0.")
    return dict.fromkeys(("other", " "), "") if "enum" in kind.limits else {}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=name_of)
def test_names_come_from_one_name_and_the_default_from_its_text(setting) -> None:
    assert SETTINGS[setting.name] is setting
    assert setting.variable == f"STRATAGEM_{setting.name.upper()}"
    assert setting.key.replace("-", "_") == setting.name
    assert setting.description.endswith(".")
    assert setting.is_option or setting.meaning == setting.description
    if setting.default is not None:
        assert setting.kind.parse(str(setting.default)) == setting.default


@pytest.mark.parametrize("setting", OF_LIBRARY, ids=name_of)
def test_setting_is_that_of_its_variable(monkeypatch, setting) -> None:
    monkeypatch.delenv(setting.variable, raising=False)
    assert settings.read(setting.name) == setting.default
    for text, value in texts_of(setting.kind).items():
        monkeypatch.setenv(setting.variable, text)
        found = settings.read(setting.name)
        assert (found, type(found)) == (value, type(value))
    for text, expected in wrong_texts_of(setting.kind).items():
        monkeypatch.setenv(setting.variable, text)
        with pytest.raises(ValueError, match=setting.variable) as caught:
            settings.read(setting.name)
        received, wanted, fix = str(caught.value).splitlines()
        name = f"Environment variable {setting.variable}"
        assert received == f"{name}: {text!r} is not {setting.kind.name}."
        assert wanted.startswith("Expected ")
        assert expected in wanted
        assert fix == "Fix: correct or unset the environment variable."


def test_every_variable_is_in_the_documentation() -> None:
    page = PAGE.read_text()
    for setting in OF_LIBRARY:
        default = setting.default
        default = (default or "none") if isinstance(default, str) else int(default)
        assert f"| `{setting.variable}` | `{default}` | {setting.meaning} |" in page
    assert page.split("Each setting has")[0].count("| `STRATAGEM_") == len(OF_LIBRARY)


def test_options_are_the_fields_of_the_launcher_with_their_defaults() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(LaunchOptions)}
    options = {setting.name: setting.default for setting in OF_LAUNCH}
    assert list(options) == list(fields)
    # None is the level of the environment, whose default is "auto".
    assert options == fields | {"log_level": "auto"}


def test_choice_of_words_is_read_in_lower_case_and_explained() -> None:
    assert choice("a color", ("red",), any_case=True).parse("RED") == "red"
    with pytest.raises(ValueError, match="Expected a warm one"):
        choice("a color", ("red",), "a warm one.").parse("blue")


# The lazy root, with a Keras that chooses its backend as the real one does and has nothing else.
KERAS = """
import os, types
_backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
config = types.SimpleNamespace(backend=lambda: _backend)
"""
LIGHT_NAMES = [
    "config",
    "errors",
    "launch",
    "ReduceOp",
    "RunOptions",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder whose `keras` stands in for the real one."""
    (tmp_path / "keras.py").write_text(KERAS)
    return tmp_path


@pytest.mark.slow
def test_real_keras_runs_on_jax_when_stratagem_was_imported_first() -> None:
    program = "import stratagem, keras; print(keras.config.backend())"
    assert run_fresh(program, KERAS_BACKEND=None)[-1] == "jax"


def test_import_after_keras_on_another_backend_names_the_fix(folder) -> None:
    program = "import keras\ntry:\n    import stratagem\nexcept ImportError as e:\n    print(e)"
    assert run_fresh(program, folder=folder, KERAS_BACKEND=None) == [
        "Keras runs on the 'tensorflow' backend.",
        "Expected the 'jax' backend, which cannot be changed once Keras is loaded.",
        "Fix: put `import stratagem` before `import keras`, or set KERAS_BACKEND=jax.",
        "Help: stratagem explain SG101",
    ]


def test_backend_that_the_user_chose_is_kept_until_a_name_needs_jax(folder) -> None:
    program = """
import sys
import stratagem
for loads in ("", "import keras; print(keras.config.backend(), stratagem.ReduceOp.SUM)"):
    exec(loads)
    try:
        stratagem.MirroredStrategy
    except ImportError as error:
        print(*str(error).splitlines()[:3], 'jax' in sys.modules, 'keras' in sys.modules)
"""
    assert run_fresh(program, folder=folder, KERAS_BACKEND="torch") == [
        "KERAS_BACKEND is 'torch'. Expected 'jax', or no value; stratagem then selects it. "
        "Fix: unset KERAS_BACKEND, or set KERAS_BACKEND=jax. False False",
        "torch ReduceOp.SUM",
        "Keras runs on the 'torch' backend. Expected the 'jax' backend, which cannot be changed "
        "once Keras is loaded. Fix: put `import stratagem` before `import keras`, or set "
        "KERAS_BACKEND=jax. False True",
    ]


def test_names_that_need_no_jax_load_none() -> None:
    program = f"""
import sys
import stratagem
for name in {LIGHT_NAMES}:
    getattr(stratagem, name)
stratagem.config.run_eagerly(False)
print(*({{'jax', 'keras'}} & set(sys.modules)))
"""
    assert run_fresh(program) == [""]


def test_old_names_are_the_same_objects() -> None:
    assert sg.experimental_set_strategy is sg.set_strategy
    assert sg.experimental.PreemptionCheckpointHandler is sg.PreemptionCheckpointHandler
    assert sg.run_standard_tensorflow_server is sg.run_standard_server
    strategy = sg.Strategy
    assert strategy.experimental_local_results is strategy.local_results
    assert strategy.concat is strategy.gather
    for name in ("values_from_function", "dataset", "datasets_from_function"):
        old, new = (
            getattr(strategy, f"{prefix}distribute_{name}") for prefix in ("experimental_", "")
        )
        assert old is new
    for name in (
        "assign_to_logical_device",
        "replicate_to_logical_devices",
        "split_to_logical_devices",
    ):
        assert getattr(strategy, f"experimental_{name}") is getattr(strategy, name)


# Tracebacks show all of the user's lines, and no others.


@pytest.fixture(params=[False, True], ids=["compiled", "eager"])
def strategy(request: pytest.FixtureRequest) -> Any:
    sg.config.run_eagerly(request.param)
    yield sg.MirroredStrategy(["cpu:0", "cpu:1"])
    sg.config.run_eagerly(False)
    sg.config.filter_tracebacks(True)


def _inner() -> None:
    raise KeyError("mine")


def _step() -> Any:
    _inner()


def _names(call: Any) -> list[str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any error has a traceback
        call()
    entries = traceback.extract_tb(caught.value.__traceback__)
    folder = "src/stratagem/"
    return ["library" if folder in entry.filename else entry.name for entry in entries]


def test_error_of_a_step_shows_the_call_and_the_line_of_the_step(strategy) -> None:
    def call() -> None:
        strategy.run(_step)

    assert _names(call)[1:] == ["call", "_step", "_inner"]
    sg.config.filter_tracebacks(False)
    assert "library" in _names(call)


def test_own_error_shows_the_call_and_how_to_see_the_rest(strategy) -> None:
    def call() -> None:
        strategy.run(_step, args=3)

    assert _names(call)[1:] == ["call"]
    with pytest.raises(ValueError, match="run received args of type int") as caught:
        call()
    assert caught.value.__notes__ == [
        "Frames of stratagem are hidden. sg.config.filter_tracebacks(False) or "
        "STRATAGEM_FILTER_TRACEBACKS=0 shows them."
    ]


def test_functions_and_gradients_inside_a_step_are_filtered(strategy) -> None:
    variable = keras.Variable(1.0)

    def loss() -> Any:
        _inner()

    def step() -> Any:
        return sg.value_and_grad(loss, [variable])

    @sg.function
    def train() -> Any:
        return strategy.run(step)

    names = _names(train)
    assert "library" not in names
    assert [name for name in names if name in ("train", "step", "loss", "_inner")] == [
        "train", "step", "loss", "_inner",
    ]  # fmt: skip


def test_causes_and_notes_stay(strategy) -> None:
    with pytest.raises(TypeError, match="enabled='off' is of type str"):
        sg.config.filter_tracebacks("off")  # pyright: ignore[reportArgumentType]

    def step() -> Any:
        error = KeyError("second")
        error.add_note("a note")
        try:
            _inner()
        except KeyError as first:
            raise error from first

    with pytest.raises(KeyError, match="second") as caught:
        strategy.run(step)
    assert caught.value.__notes__[0] == "a note"
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.args == ("mine",)


def _failing_loss(y_true: Any, y_pred: Any) -> Any:
    raise KeyError("loss")


def _failing_generator() -> Any:
    raise KeyError("data")
    yield


def test_fit_and_iterators_show_no_frames_of_this_library(strategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", _failing_loss)
    calls = {
        "_failing_loss": lambda: model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0),
        "_failing_generator": lambda: next(iter(strategy.distribute_dataset(_failing_generator()))),
    }
    for name, call in calls.items():
        with pytest.raises(KeyError) as caught:
            call()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == name
        assert not [frame for frame in frames if "src/stratagem" in frame.filename]


# Temporary folders: nothing is left of a process that ended, or of a killed one after the next.

PREFIX = "stratagem-x-"
PROGRAM = f"""
import sys
from stratagem.resources import TemporaryFolder
folder = TemporaryFolder("{PREFIX}", sys.argv[1])
(folder.path / "content").write_bytes(b"x" * 1000)
print(folder.path, flush=True)
sys.stdin.read()
"""


def age(path: Path, by_s: float = module._ABANDONED_S + 1) -> None:
    changed_s = path.stat().st_mtime - by_s
    os.utime(path, (changed_s, changed_s))


def test_folder_is_private_and_gone_when_it_is_closed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with TemporaryFolder(PREFIX) as folder:
        assert folder.path.parent == tmp_path
        assert folder.path.name.startswith(PREFIX)
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "content").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []
    folder.close()


def test_next_process_removes_at_once_the_folder_of_a_killed_one_only(tmp_path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = [Path(str(one.stdout and one.stdout.readline()).strip()) for one in processes]
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait()
    other = tmp_path / f"{PREFIX}other"  # not made by this module
    other.mkdir()
    age(other)
    try:
        with TemporaryFolder(PREFIX, tmp_path) as own, TemporaryFolder("z-", tmp_path) as foreign:
            assert {*tmp_path.iterdir()} == {own.path, foreign.path, folders[1], other}
            assert (folders[1] / "content").stat().st_size == 1000
    finally:
        for process in processes:
            process.communicate()
    assert list(tmp_path.iterdir()) == [other]


def test_folders_of_killed_processes_are_removed_where_no_other_is_made(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with TemporaryFolder(PREFIX) as own:
            remove_abandoned_folders()
            assert len([*tmp_path.iterdir()]) == 2
            process.kill()
            process.wait()
            remove_abandoned_folders()
            assert [*tmp_path.iterdir()] == [own.path]


def test_folder_without_a_lock_yet_is_removed_later(tmp_path) -> None:
    """Of a process that was killed before it gave the folder its name."""
    names = ("old", "future", "locked", "young")
    unnamed = [tmp_path / f"{module._UNNAMED}{PREFIX}{name}" for name in names]
    for folder in unnamed:
        folder.mkdir()
    with open(unnamed[2] / module._OWNER, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for folder in unnamed[:3]:
            age(folder)
        age(unnamed[1], -4 * module._ABANDONED_S)  # the clock was set back since
        TemporaryFolder(PREFIX, tmp_path).close()
    assert sorted(tmp_path.iterdir()) == unnamed[2:]


def test_folder_of_another_user_is_left_alone(tmp_path, monkeypatch) -> None:
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / module._OWNER).touch()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    TemporaryFolder(PREFIX, tmp_path).close()
    assert left.exists()
    monkeypatch.undo()
    # A link is not followed.
    (precious := tmp_path / "precious").mkdir()
    (precious / module._OWNER).touch()
    (tmp_path / f"{PREFIX}other").symlink_to(precious)
    TemporaryFolder(PREFIX, tmp_path).close()
    assert not left.exists()
    assert (precious / module._OWNER).exists()


def test_file_system_without_locks_leaves_nothing(tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="not supported"):
        TemporaryFolder(PREFIX, tmp_path)
    assert list(tmp_path.iterdir()) == []


# Cores that a process may use.


@pytest.mark.parametrize(
    ("quota", "cores"), [("50000 100000", 0.5), ("max 100000", None), ("x", None), (None, None)]
)
def test_container_limits_the_cores(tmp_path: Path, quota: str | None, cores: float | None) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n", encoding="utf-8")
    assert available_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


# Folders of arguments: an empty one is refused, wherever files are written.


def _evaluator() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    return sg.SidecarEvaluator(model, (np.ones((2, 2)), np.ones((2, 1))), "")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("directory", lambda: sg.train.CheckpointManager(sg.train.Checkpoint(), "", 1)),
        ("log_dir", lambda: sg.TensorBoard("")),
        ("checkpoint_dir", _evaluator),
        ("model_dir", lambda: sg.estimator.Estimator(lambda features: None, "")),
        ("journal_dir", lambda: sg.ParameterServerStrategy(journal_dir="")),
        pytest.param("log_dir", lambda: LaunchOptions(log_dir=""), id="log_dir of launch"),
        ("run_dir", lambda: LaunchOptions(run_dir="")),
    ],
)
def test_empty_folder_is_refused(name: str, make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=rf"{name}='' is empty\.\nExpected the path of a folder"):
        make()
    assert checked_folder("log_dir", Path("logs", "a")) == "logs/a"


# Objects that a `with` block closes, once, also after an error.


class Resource(Closing):
    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def test_error_comes_out_after_the_resource_is_closed() -> None:
    resource = Resource()
    with pytest.raises(ValueError, match="a bug"), resource:
        raise ValueError("a bug")
    assert resource.num_closed == 1
