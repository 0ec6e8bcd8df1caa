"""Commands that render, show and diagnose: output and exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from click.testing import Result

import stratagem
from stratagem.cli import main
from stratagem.cli.doctor import selftest
from stratagem.cli.doctor.findings import error
from stratagem.group.authentication.secret import Secret, find_secret
from stratagem.observe.events import encode
from tests.command_runner import CliRunner
from tests.unit.cli.manifests.kubelet import by_kind, started_pods
from tests.unit.observe.fabricated_traces import OPERATIONS, two_steps
from tests.unit.observe.fabricated_traces import write as write_of_profile
from tests.unit.observe.runs import end, first_step, process, run, straggling, write


def _call(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(main, ["kubernetes", *arguments], input=given)


def test_flags_are_the_variables_of_the_template() -> None:
    result = _call(
        "render",
        *("--name", "digits", "--image", "me/digits:v2", "--workers", "3", "--ps", "2"),
        *("--gpus-per-worker", "8", "--evaluator", "--tensorboard", "--script", "/run.py"),
        *("--args", "--epochs 5 --note 'a b'", "--port", "6000", "--set", "train_dir=/out"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    pods = {pod.host: pod for pod in started_pods(result.stdout)}
    assert list(pods) == [
        *(f"digits-worker-{index}.digits-worker" for index in range(3)),
        "digits-evaluator-0.digits-evaluator",
        *(f"digits-ps-{index}.digits-ps" for index in range(2)),
    ]
    worker = pods["digits-worker-2.digits-worker"]
    assert worker.container["image"] == "me/digits:v2"
    assert worker.container["command"][-1] == "/run.py"
    assert worker.arguments == ["--epochs", "5", "--note", "a b"]
    assert worker.container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert worker.container["ports"] == [{"name": "task", "containerPort": 6000}]
    mounts = {mount["name"]: mount["mountPath"] for mount in worker.container["volumeMounts"]}
    assert mounts["checkpoints"] == "/out"
    assert set(by_kind(result.stdout, "Deployment")) == {"digits-tensorboard"}


def test_k8s_is_short_and_the_last_assignment_wins() -> None:
    options = ("render", "--set", "worker_replicas=9", "--set", " worker_replicas = 1")
    options += ("--set", "cmdline_args=--a=b", "--set", "run_secret=ours")
    result = CliRunner().invoke(main, ["k8s", *options])
    assert result.stdout == _call(*options).stdout
    (pod,) = started_pods(result.stdout)
    assert pod.arguments == ["--a=b"]


def test_template_is_printed_edited_and_rendered(tmp_path) -> None:
    printed = _call("template").stdout
    path = tmp_path / "mine.jinja"
    path.write_text(printed.replace("has_eval = False", "has_eval = True"))
    assert len(list(started_pods(_call("render", str(path)).stdout))) == 3
    assert len(list(started_pods(_call("render", str(path), "--no-evaluator").stdout))) == 2
    ours = ("--set", "run_secret=ours")
    assert _call("render", *ours).stdout == _call("render", "-", *ours, given=printed).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "workers=3"], "has no variable 'workers'.\nExpected one of cmdline_args, "),
        (["--set", "port"], "--set port: expected NAME=VALUE."),
        (
            ["--set", "port=1", "--port", "2"],
            "port is set by --set and by its flag: omit one of them",
        ),
        (["--name", "My_Train"], "name='My_Train' is not valid."),
        (["no-such-file"], "No such file or directory"),
    ],
)
def test_invalid_arguments_exit_with_code_2(arguments, message) -> None:
    result = _call("render", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_library_that_is_missing_is_named_without_a_traceback(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = _call("render")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Rendering needs jinja2" in result.stderr
    assert "Fix: pip install 'stratagem[clusters]'" in result.stderr


def test_ray_form_is_rendered_and_its_template_printed() -> None:
    options = ("--ray", "--name", "clicks", "--workers", "3", "--ps", "2", "--gpus-per-worker", "0")
    rendered = _call("render", *options)
    (cluster,) = by_kind(rendered.stdout, "RayCluster").values()
    groups = {one["groupName"]: one["replicas"] for one in cluster["spec"]["workerGroupSpecs"]}
    assert groups == {"ps": 2, "worker": 3}
    template = _call("template", "--ray").stdout
    assert _call("render", "--ray", "-", given=template).stdout == _call("render", "--ray").stdout


def test_queues_and_variables_of_each_form() -> None:
    result = _call("render", "--ray", "--evaluator")
    assert result.exit_code == 2
    assert "has no variable 'has_eval'" in result.stderr
    for kind, options in (
        ("RayJob", ("--ray", "--script", "/run.py")),
        ("TrainJob", ("--workload", "TrainJob")),
    ):
        rendered = _call("render", *options, "--queue", "gold").stdout
        (job,) = by_kind(rendered, kind).values()
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gold"
        assert by_kind(rendered, "Job") == {}


# `stratagem watch`: frames, JSON, exports and exit codes.


def _stratagem(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.mark.parametrize("options", [["--once"], []])
def test_one_frame_without_a_terminal(tmp_path, options) -> None:
    write(tmp_path, straggling())
    result = _stratagem("watch", tmp_path, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "101 of 101" in result.stdout
    assert "Goodput after start-up: " in result.stdout


def test_json_is_the_state_and_the_account(tmp_path) -> None:
    write(tmp_path, straggling())
    values = json.loads(_stratagem("watch", tmp_path, "--json").stdout)
    assert (values["step"], values["values"]["loss"]) == (101, 1.0)
    assert values["account"]["startup_s"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["goodput"], "has no events(?s:.)*Fix: pass the value of STRATAGEM_RUN_DIR"),
        (["watch", "--once"], "has no events"),
        (["watch", "--json"], "has no events"),
        (["report"], "has no events"),
        (["profile"], "Expected a .xplane.pb file"),
    ],
    ids=" ".join,
)
def test_folder_without_anything_ends_with_exit_code_1(tmp_path, arguments, words) -> None:
    result = _stratagem(*arguments, tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(words, result.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [("watch", "--interval", "0"), ("profile", "--top", "-1")])
def test_number_that_is_too_small_is_a_usage_error(tmp_path, option) -> None:
    assert _stratagem(*option, tmp_path).exit_code == 2


def test_torn_line_and_unknown_event_are_reported_and_no_error(tmp_path) -> None:
    write(tmp_path, straggling())
    with (tmp_path / "events" / "worker-0.0.jsonl").open("a") as file:
        file.write('{"version": 1, "kind": "coffee"}\n{"version": 1, "ki')
    result = _stratagem("watch", tmp_path, "--once")
    assert result.exit_code == 0
    assert "its kind is 'coffee'" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_terminal_is_followed_until_the_run_is_over(tmp_path) -> None:
    write(tmp_path, run(process("worker 0", 0, first_step(5, 1))))
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "stratagem", "watch", str(tmp_path), "--interval", "0.1"]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, env=os.environ | {"TERM": "xterm"}
    ) as watching:
        os.close(terminal)
        shown = b""
        deadline_s = time.monotonic() + 60
        while b"worker 0" not in shown and time.monotonic() < deadline_s:
            shown += os.read(controller, 65536)
        with (tmp_path / "events" / "worker-0.0.jsonl").open("a") as file:
            file.write(encode(end(6)) + "\n")
        while True:
            try:
                shown += os.read(controller, 65536)
            except OSError:  # the terminal is closed
                break
        assert watching.wait(60) == 0
    os.close(controller)
    assert b"finished" in shown


# `stratagem profile`: output and exit codes.


@pytest.fixture
def folder(tmp_path):
    for worker in (0, 1):
        path = tmp_path / f"worker-{worker}" / "plugins" / "profile" / "a" / "vm.xplane.pb"
        write_of_profile(path, two_steps(), OPERATIONS)
    return tmp_path


def test_tables_of_each_worker(folder) -> None:
    result = _stratagem("profile", folder, "--top", 1)
    assert (result.exit_code, result.stderr) == (0, "")
    titles = [line for line in result.stdout.splitlines() if line.startswith("worker-")]
    assert titles == [
        f"worker-{worker}: 2 steps of 0.00 ms, 2 CPU devices, busy 70%" for worker in (0, 1)
    ]
    assert "model/dense" in result.stdout
    assert "all-reduce" not in result.stdout


def test_json_has_the_same(folder) -> None:
    result = _stratagem("profile", folder, "--json", "--top", 1)
    first, second = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert first["trace"].endswith("worker-0/plugins/profile/a/vm.xplane.pb")
    assert first["parts_s"] == second["parts_s"]
    assert sum(first["parts_s"].values()) == pytest.approx(2e-6)
    assert first["step_s"] == pytest.approx(1e-6)
    assert [one["layer"] for one in first["operations"]] == ["model/dense"]
    assert _stratagem("profile", first["trace"]).stdout.startswith("vm.xplane.pb: 2 steps of")


# `stratagem slurm`: output and exit codes.


def _call_of_slurm(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(main, ["slurm", *arguments], input=given)


def test_slurm_flags_are_the_variables_of_the_template() -> None:
    result = _call_of_slurm(
        "render",
        *("--name", "digits", "--nodes", "2", "--tasks-per-node", "4", "--gpus-per-worker", "1"),
        *("--partition", "gpu", "--time", "12:00:00", "--script", "my train.py"),
        *("--args", "--epochs 5 --note 'a b'", "--set", "python=.venv/bin/python"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    for line in (
        "#SBATCH --job-name=digits",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks=8",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=12:00:00",
        "    .venv/bin/python -u 'my train.py' --epochs 5 --note 'a b'",
    ):
        assert f"\n{line}\n" in result.stdout


# `stratagem doctor` and `stratagem env`, as a user runs them.


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("stratagem")), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_machine_that_can_train_exits_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    finished = _run("doctor")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "JAX sees" in finished.stdout
    assert "0 errors" in finished.stdout


def test_error_is_shown_with_its_fix_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    finished = _run("doctor", "--json")
    assert finished.returncode == 1
    (error,) = [one for one in json.loads(finished.stdout) if one["level"] == "error"]
    assert error["topic"] == "settings"
    assert "KERAS_BACKEND=torch" in error["text"]
    assert "KERAS_BACKEND=jax" in error["fix"]


@pytest.mark.slow
def test_warning_counts_if_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_DEBUG_NANS", "true")
    assert _run("doctor", "--json").returncode == 0
    assert _run("doctor", "--json", "--strict").returncode == 1


@pytest.mark.slow
def test_self_test_is_a_topic_and_its_failure_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    finished = _run("doctor", "--self-test", "--json")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    tested = [one for one in json.loads(finished.stdout) if one["topic"] == "self-test"]
    assert len(tested) == len(selftest.CASES)
    assert {one["level"] for one in tested} <= {"ok", "note"}
    monkeypatch.setattr(selftest, "check_cases", lambda: [error("OneDeviceStrategy: lost.", "run")])
    result = CliRunner().invoke(main, ["doctor", "--self-test"])
    assert result.exit_code == 1
    assert "OneDeviceStrategy: lost." in result.output


@pytest.mark.slow
def test_env_is_a_table_or_json() -> None:
    table, values = _run("env"), _run("env", "--json")
    assert (table.returncode, values.returncode) == (0, 0)
    assert table.stdout.startswith("| | |\n|---|---|\n| system |")
    assert "| keras | " in table.stdout
    found = json.loads(values.stdout)
    assert found["devices"]
    assert found["versions"]["keras"]


# Completion in the shell, by click's variable.


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("stratagem dev", ["devices"]),
        ("stratagem kubernetes ren", ["render"]),
        ("stratagem launch --max-", ["--max-restarts", "--max-preemptions", "--max-workers"]),
        ("stratagem launch --show ", ["all", "leader"]),
        ("stratagem explain sg20", [f"SG20{number}" for number in range(1, 9)]),
    ],
)
def test_commands_options_and_values_are_completed(typed, completed) -> None:
    variables = {
        "_STRATAGEM_COMPLETE": "bash_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
    }
    result = CliRunner().invoke(main, [], env=variables, prog_name="stratagem")
    assert [line.partition(",")[2] for line in result.stdout.splitlines()] == completed


# `stratagem secret`: secrets on stdout and in files.


def test_secret_is_printed() -> None:
    results = [CliRunner().invoke(main, ["secret"]) for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 0]
    assert len({Secret(result.output.strip()).key("x") for result in results}) == 2


def test_file_is_only_for_its_owner_and_is_accepted(monkeypatch, tmp_path) -> None:
    path = tmp_path / "run.secret"
    result = CliRunner().invoke(main, ["secret", "--file", str(path)])
    assert (result.exit_code, result.output) == (0, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.delenv("STRATAGEM_SECRET", raising=False)
    monkeypatch.setenv("STRATAGEM_SECRET_FILE", str(path))
    found = find_secret()
    assert path.read_text().strip() in found.variables().values()


def test_file_that_exists_is_not_replaced(tmp_path) -> None:
    path = tmp_path / "run.secret"
    path.write_text("mine")
    result = CliRunner().invoke(main, ["secret", "--file", str(path)])
    assert result.exit_code == 1
    assert f"{path} cannot be created: File exists." in result.stderr
    assert path.read_text() == "mine"


# The root of the `stratagem` command: help, version, and unknown commands.

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_command_with_its_line(option) -> None:
    result = CliRunner().invoke(main, [option])
    assert result.exit_code == 0
    for name, command in main.commands.items():
        assert f"  {name}" in result.output
        assert command.get_short_help_str(100) in result.output


def test_version_is_that_of_the_project() -> None:
    version = tomllib.loads(PYPROJECT.read_text())["project"]["version"]
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"stratagem, version {version}\n"
    assert stratagem.__version__ == version
