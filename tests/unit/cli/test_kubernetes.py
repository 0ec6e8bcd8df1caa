"""`stratagem kubernetes`: output and exit codes."""

from __future__ import annotations

import json
import sys

import pytest
import yaml
from click.testing import Result

from stratagem.cli import main
from tests.command_runner import CliRunner
from tests.unit.cli.manifests.definitions import definition, open_definitions_text
from tests.unit.cli.manifests.kubelet import by_kind, started_pods


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


@pytest.mark.parametrize("command", ["kubernetes", "k8s"])
def test_what_is_rendered_is_valid(command) -> None:
    rendered = CliRunner().invoke(main, [command, "render", "--workers", "3"])
    checked = CliRunner().invoke(main, [command, "validate"], input=rendered.stdout)
    assert (checked.exit_code, checked.stdout.startswith("Valid for Kubernetes 1.")) == (0, True)


@pytest.mark.slow
def test_template_is_printed_edited_and_rendered(tmp_path) -> None:
    printed = _call("template").stdout
    path = tmp_path / "mine.jinja"
    path.write_text(
        printed.replace("worker_replicas = 2", "worker_replicas = 3")
        .replace("has_eval = False", "has_eval = True")
        .replace('run_secret = ""', 'run_secret = "ours"')
    )
    assert len(list(started_pods(_call("render", str(path)).stdout))) == 4
    assert len(list(started_pods(_call("render", str(path), "--workers", "5").stdout))) == 6
    assert len(list(started_pods(_call("render", str(path), "--no-evaluator").stdout))) == 3
    from_input = _call("render", "-", given=path.read_text()).stdout
    assert from_input == _call("render", str(path)).stdout
    ours = ("--set", "run_secret=ours")
    assert _call("render", *ours).stdout == _call("render", "-", *ours, given=printed).stdout


def test_last_assignment_wins_and_may_contain_an_equals_sign() -> None:
    result = _call(
        "render",
        *("--set", "worker_replicas=9", "--set", " worker_replicas = 1"),
        "--set",
        "cmdline_args=--a=b",
    )
    (pod,) = started_pods(result.stdout)
    assert pod.arguments == ["--a=b"]


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
        (["--workers", "0"], "worker_replicas=0 is not valid."),
        (["--workers", "two"], "Invalid value for '--workers': 'two' is not a valid integer."),
        (["--port", "70000"], "Expected a port from 1 to 65535."),
        (["--args", "'open"], "No closing quotation"),
        (["no-such-file"], "No such file or directory"),
        (["--unknown"], "No such option"),
    ],
)
def test_invalid_arguments_exit_with_code_2(arguments, message) -> None:
    result = _call("render", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_wrong_template_is_named_with_its_line(tmp_path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("a: 1\n{% if %}\n")
    result = _call("render", str(path))
    assert result.exit_code == 2
    assert f"{path}, line 2: " in result.stderr


@pytest.mark.slow
def test_each_problem_is_a_line_and_the_exit_code_is_1(tmp_path) -> None:
    path = tmp_path / "manifests.yaml"
    path.write_text(_call("render").stdout.replace("port: 5000", "prot: 5000"))
    result = _call("validate", str(path), "--kubernetes-version", "1.30")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "Service/dist-strat-example-worker: spec.ports[0]: 'port' is a required property",
        "Service/dist-strat-example-worker: spec.ports[0]: "
        "Additional properties are not allowed ('prot' was unexpected)",
    ]


def test_problems_are_json(tmp_path) -> None:
    path = tmp_path / "manifests.yaml"
    path.write_text(_call("render").stdout.replace("port: 5000", "prot: 5000"))
    result = _call("validate", "--json", str(path), "--kubernetes-version", "1.30")
    assert (result.exit_code, result.stderr) == (1, "")
    values = json.loads(result.stdout)
    assert values["kubernetes_version"] == "1.30"
    assert values["problems"][0] == {
        "document": "Service/dist-strat-example-worker",
        "path": "spec.ports[0]",
        "message": "'port' is a required property",
    }


@pytest.mark.parametrize("given", ["", "a: [", "text", "a: 1\n"])
def test_invalid_manifest_is_a_problem(given) -> None:
    result = _call("validate", given=given)
    assert (result.exit_code, len(result.stdout.splitlines())) == (1, 1)


@pytest.mark.parametrize(
    ("version", "exit_code"), [("v1.31.4", 0), ("1.31", 0), ("1.12", 2), ("newest", 2)]
)
def test_version_is_written_as_kubectl_writes_it(version, exit_code) -> None:
    rendered = _call("render").stdout
    result = _call("validate", "--kubernetes-version", version, given=rendered)
    assert result.exit_code == exit_code
    assert ("are not installed" in result.stderr) == (exit_code == 2)


def test_library_that_is_missing_is_named_without_a_traceback(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = _call("render")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Fix: pip install 'stratagem[clusters]'" in result.stderr


def test_ray_form_is_rendered_valid_and_printed(tmp_path) -> None:
    options = ("--ray", "--name", "clicks", "--workers", "3", "--ps", "2", "--gpus-per-worker", "0")
    rendered = _call("render", *options)
    (cluster,) = by_kind(rendered.stdout, "RayCluster").values()
    groups = {one["groupName"]: one["replicas"] for one in cluster["spec"]["workerGroupSpecs"]}
    assert groups == {"ps": 2, "worker": 3}
    assert _call("validate", given=rendered.stdout).exit_code == 1  # no definition was passed
    path = tmp_path / "crds.yaml"
    path.write_text(open_definitions_text())
    checked = _call("validate", "--crds", str(path), given=rendered.stdout)
    assert (checked.exit_code, checked.stdout[:21]) == (0, "Valid for Kubernetes ")
    template = _call("template", "--ray").stdout
    assert _call("render", "--ray", "-", given=template).stdout == _call("render", "--ray").stdout


def test_ray_form_has_variables_of_its_own() -> None:
    result = _call("render", "--ray", "--evaluator")
    assert result.exit_code == 2
    assert "has no variable 'has_eval'" in result.stderr
    result = _call("render", "--ray", "--script", "/run.py", "--queue", "gold")
    (job,) = by_kind(result.stdout, "RayJob").values()
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gold"


def test_rules_that_only_an_api_server_checks_are_printed(tmp_path) -> None:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema |= {"x-kubernetes-validations": [{"rule": "self.size > 0"}]}
    path = tmp_path / "crds.yaml"
    path.write_text(yaml.safe_dump(definition("Thing", "example.com/v1", schema)))
    given = "{apiVersion: example.com/v1, kind: Thing, metadata: {name: a}}"
    result = _call("validate", "--crds", str(path), given=given)
    assert result.stdout.splitlines()[1:] == [
        "Not checked, a rule in CEL: Thing/a: (root): self.size > 0"
    ]
    values = json.loads(_call("validate", "--json", "--crds", str(path), given=given).stdout)
    assert [one["rule"] for one in values["unchecked_rules"]] == ["self.size > 0"]
    path.write_text("kind: Service")
    result = _call("validate", "--crds", str(path), given=given)
    assert result.exit_code == 2
    assert "The definitions cannot be read: Service/(no name): " in result.stderr


@pytest.mark.parametrize("workload", ["JobSet", "TrainJob"])
def test_workload_is_chosen_by_a_flag(workload) -> None:
    result = _call("render", "--workload", workload, "--queue", "gold")
    (one,) = by_kind(result.stdout, workload).values()
    assert one["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gold"
    assert by_kind(result.stdout, "Job") == {}
