"""Slurm scripts: the cluster that each worker detects from srun's variables."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stratagem.cli.manifests.kubernetes import render_kubernetes, validate_kubernetes
from stratagem.cli.manifests.variable_rules import (
    ray_template,
    render_ray,
    render_slurm,
    slurm_template,
)
from stratagem.group.authentication.secret import Secret
from tests.unit.cli.manifests.definitions import open_definitions
from tests.unit.cli.manifests.kubelet import by_kind, documents, pod_specs, started_pods

_BASH = shutil.which("bash") or "bash"

# Tells which task it is, in one write: the tasks share one output.
_WORKER = """
import json, os, sys
from stratagem.cluster import detect
resolver = detect()
spec = resolver.cluster_spec()
processes = resolver.processes()
told = {
    "task": [resolver.task_type, resolver.task_id],
    "process": [processes.process_id, processes.num_processes],
    "hosts": [address.rpartition(":")[0] for address in spec.as_dict()["worker"]],
    "coordinator_is_first": processes.coordinator_address == spec.task_address("worker", 0),
    "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "arguments": sys.argv[1:],
    "secret": os.environ["STRATAGEM_SECRET"],
}
os.write(1, (json.dumps(told) + "\\n").encode())
sys.exit(int(os.environ.get("EXIT_CODES", "0,0,0").split(",")[resolver.task_id]))
"""

# Starts the tasks node by node, as srun with --distribution=block; ends with the highest code.
_SRUN = """
import itertools, os, subprocess, sys
options = list(itertools.takewhile(lambda word: word.startswith("--"), sys.argv[1:]))
command = sys.argv[1 + len(options) :]
assert "--distribution=block" in options, options
counts = [int(n) for n in os.environ["TASKS_OF_NODES"].split(",")]
common = {
    "SLURM_STEP_NUM_TASKS": str(sum(counts)),
    "SLURM_STEP_NODELIST": f"node[1-{len(counts)}]",
    "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
}
rank, codes = 0, []
for node, count in enumerate(counts, 1):
    for _ in range(count):
        own = {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"node{node}"}
        codes.append(subprocess.run(command, env={**os.environ, **common, **own}).returncode)
        rank += 1
sys.exit(max(codes))
"""


class _Run:
    """A script as sbatch would start it, with a `srun` and a `scontrol` of our own."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.variables = variables
        self.requeued: list[str] = []
        self.exit_code = -1

    def __call__(self, script: str) -> list[dict[str, object]]:
        (self.folder / "my worker.py").write_text(_WORKER)
        self._program("srun", f"#!{sys.executable}\n{_SRUN}")
        self._program("scontrol", f'#!{_BASH}\necho "$@" >> {self.folder}/scontrol.txt\n')
        checked = subprocess.run([_BASH, "-n"], input=script, text=True, capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, "")
        told = dict(re.findall(r"^#SBATCH --([-a-z]+)=(.*)$", script, re.MULTILINE))
        counts = _block(int(told["ntasks"]), int(told["nodes"]), int(told["ntasks-per-node"]))
        environment = {
            name: text for name, text in os.environ.items() if not name.startswith("SLURM")
        }
        for name in ("TF_CONFIG", "STRATAGEM_SECRET", "STRATAGEM_SECRET_FILE"):
            environment.pop(name, None)
        environment |= {
            "PATH": f"{self.folder}:{environment['PATH']}",
            "SLURM_JOB_ID": "4711",
            "TASKS_OF_NODES": ",".join(map(str, counts)),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(int(told.get("gpus-per-node", 0))))),
            **self.variables,
        }
        finished = subprocess.run(
            [_BASH],
            input=script,
            text=True,
            capture_output=True,
            cwd=self.folder,
            env=environment,
            timeout=120,
        )
        self.exit_code = finished.returncode
        assert finished.stderr == ""
        requeued = self.folder / "scontrol.txt"
        self.requeued = requeued.read_text().splitlines() if requeued.exists() else []
        return [json.loads(line) for line in finished.stdout.splitlines()]

    def _program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _srun_line(script: str) -> str:
    (line,) = (line for line in script.splitlines() if line.startswith("srun "))
    return line


def _block(tasks: int, nodes: int, most: int) -> list[int]:
    counts = [min(most, tasks - most * node) for node in range(nodes)]
    assert all(count > 0 for count in counts), "a node without a task"
    assert sum(counts) == tasks, "a task without a node"
    return counts


def _render(**overrides: object) -> str:
    given = {"python": sys.executable, "script": "my worker.py", **overrides}
    nodes = given.pop("nodes", None)
    return render_slurm(given, nodes=nodes if isinstance(nodes, int) else None)


def _directive(script: str, name: str) -> str | None:
    found = re.findall(rf"^#SBATCH --{name}=(.*)$", script, re.MULTILINE)
    return found[0] if found else None


def test_every_worker_finds_its_place_and_its_gpus(tmp_path) -> None:
    words = ["--text", "a b", "it's", '{"a": "$HOME"}', "*", "; exit 3", "gr\u00fc\u00df"]
    run = _Run(tmp_path)
    told = run(
        _render(worker_replicas=3, tasks_per_node=2, num_gpus_per_worker=2, cmdline_args=words)
    )
    assert [worker["task"] for worker in told] == [["worker", rank] for rank in range(3)]
    assert [worker["process"] for worker in told] == [[rank, 3] for rank in range(3)]
    assert [worker["gpus"] for worker in told] == ["0,1", "2,3", "0,1"]
    for worker in told:
        assert worker["hosts"] == ["node1", "node1", "node2"]
        assert worker["coordinator_is_first"] is True
        assert worker["arguments"] == words
    assert len({worker["secret"] for worker in told}) == 1
    Secret(str(told[0]["secret"]))
    assert (run.exit_code, run.requeued) == (0, [])


@pytest.mark.parametrize(
    ("codes", "exit_code", "requeued"),
    [("42,42", 42, ["requeue 4711"]), ("1,1", 1, []), ("0,0", 0, []), ("42,137", 137, [])],
)
def test_job_that_has_saved_before_it_had_to_stop_runs_again(
    tmp_path, codes, exit_code, requeued
) -> None:
    run = _Run(tmp_path, EXIT_CODES=codes)
    assert len(run(_render())) == 2
    assert (run.exit_code, run.requeued) == (exit_code, requeued)


def test_directives_match_the_request() -> None:
    script = _render(
        name="digits",
        worker_replicas=8,
        tasks_per_node=4,
        num_gpus_per_worker=2,
        cpus_per_worker=6,
        partition="gpu,long",
        time="1-12:00:00",
        grace_period_s=300,
    )
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=digits\n")
    for name, text in {
        "nodes": "2",
        "ntasks": "8",
        "ntasks-per-node": "4",
        "gpus-per-node": "8",
        "cpus-per-task": "6",
        "partition": "gpu,long",
        "time": "1-12:00:00",
        "signal": "TERM@300",
        "open-mode": "append",
    }.items():
        assert _directive(script, name) == text
    assert "#SBATCH --requeue\n" in script
    assert "--cpus-per-task=6" in _srun_line(script)
    # Slurm reads directives down to the first command only.
    assert script.rindex("#SBATCH") < script.index("\nsrun")


def test_what_was_not_asked_for_is_left_to_the_site() -> None:
    script = _render(num_gpus_per_worker=0)
    for name in ("gpus-per-node", "cpus-per-task", "partition", "time"):
        assert _directive(script, name) is None
    assert "cpus-per-task" not in script


@pytest.mark.parametrize(
    ("overrides", "nodes", "tasks", "on_a_node"),
    [
        ({"nodes": 3}, "3", "3", "1"),
        ({"nodes": 3, "tasks_per_node": 4}, "3", "12", "4"),
        ({"nodes": 2, "worker_replicas": 5}, "2", "5", "3"),
        ({"nodes": 2, "worker_replicas": 5, "tasks_per_node": "4"}, "2", "5", "4"),
        ({"worker_replicas": "5", "tasks_per_node": 2}, "3", "5", "2"),
        ({"worker_replicas": 1, "tasks_per_node": 8}, "1", "1", "1"),
        ({"nodes": 4, "ps_replicas": 1}, "4", "4", "1"),
        ({"nodes": 2, "ps_replicas": 2, "worker_replicas": 3}, "2", "6", "3"),
    ],
)
def test_nodes_and_workers_follow_from_each_other(overrides, nodes, tasks, on_a_node) -> None:
    script = _render(**overrides)
    assert _directive(script, "nodes") == nodes
    assert _directive(script, "ntasks") == tasks
    assert _directive(script, "ntasks-per-node") == on_a_node


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"nodes": 0}, r"nodes=0(?s:.)*at least one node"),
        (
            {"nodes": 3, "worker_replicas": 2, "tasks_per_node": 1},
            r"2 workers at 1 per node need 2 nodes, but 3 were requested",
        ),
        ({"nodes": 3, "worker_replicas": 2}, "as many nodes as the tasks need"),
        ({"nodes": 3, "ps_replicas": 2}, "worker_replicas=0 is not valid"),
        (
            {"nodes": 2, "ps_replicas": 1, "worker_replicas": 1, "tasks_per_node": 1},
            "1 workers and 2 tasks of servers at 1 per node need 3 nodes",
        ),
        ({"ps_replicas": -1}, "at least 0"),
        ({"heterogeneous": 2}, "True or False"),
        ({"array": "0-"}, "indices such as 0-7, 1,3,5 or 0-15:4"),
        ({"array": "1", "heterogeneous": True}, "Slurm has no arrays of heterogeneous jobs"),
        ({"worker_replicas": 0}, "worker_replicas=0 is not valid"),
        ({"name": "a b"}, "letters, digits, dots, dashes and underscores"),
        ({"name": "a\n#SBATCH --account=x"}, "letters, digits, dots, dashes and underscores"),
        ({"partition": "a b"}, "partition names separated by commas"),
        ({"time": "2 hours"}, "minutes, or a time such as 30:00"),
        ({"grace_period_s": 65536}, "at least 0 and at most 65535"),
        ({"python": ""}, "the path of a file"),
        ({"cmdline_args": "'"}, "cannot be split into words"),
        ({"has_eval": True}, "slurm.sh.jinja has no variable 'has_eval'"),
    ],
)
def test_value_that_cannot_work_is_named(overrides, message) -> None:
    with pytest.raises(ValueError, match=message):
        _render(**overrides)


@pytest.mark.parametrize("time", ["", "90", "30:00", "12:00:00", "1-12", "1-12:30", "UNLIMITED"])
def test_valid_slurm_times_are_accepted(time) -> None:
    assert _directive(_render(time=time), "time") == (time or None)


def test_edited_template_is_rendered() -> None:
    edited = slurm_template().replace("worker_replicas = 2", "worker_replicas = 7")
    assert _directive(render_slurm(template=edited), "ntasks") == "7"


# Stands in for Python: tells its task and arguments. Task 0 trains until it gets a notice.
_INTERPRETER = """#!/bin/bash
if [ "$1" = -c ]; then exec python3 "$@"; fi
echo "$SLURM_PROCID $STRATAGEM_SLURM_JOBS $*"
if [ "$SLURM_PROCID" = 0 ]; then
    trap 'echo saved; exit 42' TERM
    touch trains
    while :; do sleep 0.05; done
fi
"""


def _with_servers(**overrides: object) -> str:
    return _render(ps_replicas=1, worker_replicas=2, num_gpus_per_worker=2, **overrides)


def test_coordinator_alone_gets_the_notice_and_the_job_runs_again(tmp_path) -> None:
    programs = {
        "my python": _INTERPRETER,
        "srun": f"#!{sys.executable}\n{_SRUN}",
        "scontrol": f'#!{_BASH}\necho "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    (tmp_path / "job.sh").write_text(_with_servers(python=str(tmp_path / "my python"), array="0-3"))
    variables = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "TASKS_OF_NODES": "2,2",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    command = (_BASH, "job.sh")
    with subprocess.Popen(
        command, cwd=tmp_path, env=variables, text=True, stdout=subprocess.PIPE
    ) as script:
        deadline_s = time.monotonic() + 60
        while not (tmp_path / "trains").exists():
            assert script.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        script.send_signal(signal.SIGTERM)
        printed = script.communicate(timeout=60)[0].splitlines()
    assert printed == [
        "0 chief=1,ps=1,worker=2 -u my worker.py",
        "saved",
        *(f"{rank} chief=1,ps=1,worker=2 -m stratagem server" for rank in (1, 2, 3)),
        "requeue 7_3",
    ]
    assert script.returncode == 42
    assert not [*tmp_path.glob("tmp.*")]


def test_heterogeneous_job_has_gpus_for_its_workers_only() -> None:
    script = _with_servers(heterogeneous=True, tasks_per_node=2, partition="gpu", time="90")
    servers, workers = script.split("#SBATCH hetjob\n")
    for component, tasks, gpus in ((servers, "2", None), (workers, "2", "4")):
        assert _directive(component, "ntasks") == tasks
        assert _directive(component, "gpus-per-node") == gpus
        assert _directive(component, "partition") == "gpu"
        assert _directive(component, "time") == "90"
        assert _directive(component, "signal") == "B:TERM@120"
        assert "#SBATCH --requeue\n" in component
    assert "--het-group=0,1" in _srun_line(script)
    assert "#SBATCH hetjob" not in _with_servers()
    assert _directive(_with_servers(), "ntasks") == "4"


def test_array_has_a_directive_and_requeues_its_element() -> None:
    script = _render(array="0-7%2")
    assert _directive(script, "array") == "0-7%2"
    assert 'requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' in script


def test_template_of_an_earlier_version_is_rendered() -> None:
    # Without servers, arrays and heterogeneous jobs.
    head = "{% set worker_replicas = 2 -%}{% set tasks_per_node = 1 -%}"
    assert render_slurm({}, f"{head}#SBATCH --ntasks={{{{ worker_replicas }}}}", nodes=3).endswith(
        "=3"
    )


def test_secret_of_the_user_is_kept(tmp_path) -> None:
    (worker, _) = _Run(tmp_path, STRATAGEM_SECRET="s" * 32)(_render())
    assert worker["secret"] == "s" * 32


# Pods of every rendered form: no root, nothing writable but volumes, and no strangers.

_ALL = {
    "name": "run",
    "ps_replicas": 2,
    "input_replicas": 2,
    "has_eval": True,
    "has_tensorboard": True,
}
FORMS: dict[str, Callable[..., str]] = {
    **{
        workload: lambda workload=workload, **more: render_kubernetes(
            {**_ALL, "workload": workload, **more}
        )
        for workload in ("Job", "JobSet", "TrainJob")
    },
    "RayCluster": lambda **more: render_ray({"name": "run", **more}),
    "RayJob": lambda **more: render_ray({"name": "run", "script": "/train.py", **more}),
}


@pytest.fixture(params=FORMS)
def form(request) -> Callable[..., str]:
    return FORMS[request.param]


def test_pods_meet_the_restricted_pod_security_standard(form) -> None:
    specs = pod_specs(form(user_id=2000))
    assert specs
    for spec in specs:
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 2000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_home_and_temporary_files_are_on_a_volume(form) -> None:
    for spec in pod_specs(form()):
        (container,) = spec["containers"]
        assert {"name": "HOME", "value": "/tmp"} in container["env"]
        assert {"name": "temporary", "mountPath": "/tmp"} in container["volumeMounts"]
        assert {"name": "temporary", "emptyDir": {}} in spec["volumes"]
        names = [volume["name"] for volume in spec["volumes"]]
        assert sorted(names) == sorted(mount["name"] for mount in container["volumeMounts"])


def test_root_is_writable_if_asked(form) -> None:
    for spec in pod_specs(form(read_only_root=False)):
        assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is False


def _labels(value: Any) -> list[dict[str, str]]:
    """Labels of all templates of pods in a document."""
    if isinstance(value, list):
        return [labels for part in value for labels in _labels(part)]
    if not isinstance(value, dict):
        return []
    own = [value["metadata"]["labels"]] if "containers" in value.get("spec", {}) else []
    return own + [labels for part in value.values() for labels in _labels(part)]


def test_network_policy_admits_only_the_pods_of_the_run(form) -> None:
    manifests = form()
    (policy,) = by_kind(manifests, "NetworkPolicy").values()
    mine = {"app.kubernetes.io/name": "run"}
    assert policy["spec"]["podSelector"] == {"matchLabels": mine}
    assert policy["spec"]["policyTypes"] == ["Ingress"]  # names are still looked up
    assert policy["spec"]["ingress"][0] == {"from": [{"podSelector": {"matchLabels": mine}}]}
    labels = _labels(documents(manifests))
    assert len(labels) == len(pod_specs(manifests))
    assert all(mine.items() <= one.items() for one in labels)


def test_exposed_tasks_are_admitted_at_their_port_and_tensorboard_is_not() -> None:
    manifests = render_kubernetes({**_ALL, "expose_tasks": True, "port": 6000})
    policy = by_kind(manifests, "NetworkPolicy")["run-outside"]["spec"]
    assert policy["ingress"] == [{"ports": [{"port": 6000}]}]
    (rule,) = policy["podSelector"]["matchExpressions"]
    admitted = [one for one in _labels(documents(manifests)) if one[rule["key"]] in rule["values"]]
    assert {one["app.kubernetes.io/component"] for one in admitted} == {"worker", "ps", "evaluator"}


@pytest.mark.parametrize(
    ("evictions", "budgets"),
    [(0, {"worker": 4, "ps": 2, "evaluator": 1}), (1, {"worker": 3, "ps": 1}), (9, {})],
)
@pytest.mark.parametrize("workload", ["Job", "JobSet", "TrainJob"])
def test_disruption_budgets_leave_the_rest_of_each_role(workload, evictions, budgets) -> None:
    manifests = FORMS[workload](worker_replicas=4, max_evictions=evictions)
    found = by_kind(manifests, "PodDisruptionBudget")
    assert {name: one["spec"]["minAvailable"] for name, one in found.items()} == {
        f"run-{role}": count for role, count in budgets.items()
    }
    for budget in found.values():
        selector = budget["spec"]["selector"]["matchLabels"]
        selected = [
            pod for pod in started_pods(manifests) if selector.items() <= pod.labels.items()
        ]
        assert len(selected) == budget["spec"]["minAvailable"] + evictions


@pytest.mark.parametrize("workload", ["Job", "JobSet", "TrainJob"])
def test_pods_have_the_grace_that_their_process_is_told(workload) -> None:
    for pod in started_pods(FORMS[workload](grace_period_s=77)):
        assert pod.spec["terminationGracePeriodSeconds"] == 77
        assert pod.environment["STRATAGEM_POD_GRACE_S"] == "77"
        assert "lifecycle" not in pod.container  # a hook would take from that time


@pytest.mark.parametrize("workload", ["JobSet", "TrainJob"])
def test_job_set_ends_with_its_workers_and_counts_failures_as_jobs_do(workload) -> None:
    manifests = FORMS[workload]()
    if workload == "JobSet":
        spec = by_kind(manifests, "JobSet")["run"]["spec"]
    else:
        spec = by_kind(manifests, "TrainingRuntime")["run"]["spec"]["template"]["spec"]
    worker = "worker" if workload == "JobSet" else "node"
    targets = [worker, "evaluator"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": targets}
    jobs = {one["name"]: one["template"]["spec"] for one in spec["replicatedJobs"]}
    single = by_kind(FORMS["Job"](), "Job")["run-worker"]["spec"]
    for job in jobs.values():
        for field in ("podFailurePolicy", "backoffLimitPerIndex", "maxFailedIndexes"):
            assert job[field] == single[field]
    # Trainer looks for a container of this name.
    assert jobs[worker]["template"]["spec"]["containers"][0]["name"] == worker


def test_kueue_s_label_is_on_the_object_that_it_admits(form) -> None:
    marked = [
        document["kind"]
        for document in documents(form(queue="gold"))
        if document["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == "gold"
    ]
    kinds = {"Job", "StatefulSet", "JobSet", "TrainJob", "RayCluster", "RayJob"}
    assert marked
    assert set(marked) <= kinds
    assert "kueue" not in form()


# KubeRay manifests: rendering and validation.

_VALUES = {"name": "clicks", "worker_replicas": 4, "ps_replicas": 3, "num_gpus_per_worker": 8}


@pytest.fixture
def cluster() -> dict[str, Any]:
    return copy.deepcopy(by_kind(render_ray(_VALUES), "RayCluster")["clicks"])


def _groups(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    spec = cluster["spec"]
    named = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"], **named}


def test_each_role_is_a_group_of_its_size(cluster) -> None:
    groups = _groups(cluster)
    sizes = {name: group.get("replicas") for name, group in groups.items()}
    assert sizes == {"head": None, "ps": 3, "worker": 4}
    limits = {
        name: group["template"]["spec"]["containers"][0]["resources"]["limits"]
        for name, group in groups.items()
    }
    assert limits["worker"] == {"memory": "4Gi", "nvidia.com/gpu": 8}
    assert limits["ps"] == limits["head"] == {"memory": "4Gi"}


def test_machines_show_their_purpose(cluster) -> None:
    groups = _groups(cluster)
    for role in ("ps", "worker"):
        # The operator writes the values behind an equals sign into a command of a shell.
        (word,) = shlex.split("--resources=" + groups[role]["rayStartParams"]["resources"])
        assert json.loads(word.partition("=")[2]) == {role: 1}
    assert groups["head"]["rayStartParams"]["num-cpus"] == "0"


def test_every_pod_has_the_token_and_none_has_it_in_clear(cluster) -> None:
    for group in _groups(cluster).values():
        (container,) = group["template"]["spec"]["containers"]
        variables = {one["name"]: one for one in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
            "name": "clicks-token",
            "key": "auth_token",
        }


def test_service_leads_to_the_port_for_jobs(cluster) -> None:
    service = by_kind(render_ray({**_VALUES, "port": 9000}), "Service")["clicks-jobs"]
    assert service["spec"]["ports"] == [{"name": "jobs", "port": 9000, "targetPort": "dashboard"}]
    head = cluster["spec"]["headGroupSpec"]["template"]
    assert service["spec"]["selector"] == head["metadata"]["labels"]
    (container,) = head["spec"]["containers"]
    assert "dashboard" in {port["name"] for port in container["ports"]}


def test_all_of_it_is_valid() -> None:
    for version in ("1.29", "1.33", None):
        for values in (_VALUES, {"num_gpus_per_worker": 0}, {"script": "/a.py", "queue": "gold"}):
            assert validate_kubernetes(render_ray(values), version, open_definitions()) == []


def test_operator_has_the_token_for_its_own_requests(cluster) -> None:
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "clicks-token"}


def test_script_runs_in_a_cluster_of_its_own() -> None:
    words = ["--note", "a b", "$HOME", "'"]
    manifests = render_ray({**_VALUES, "script": "/my run.py", "cmdline_args": words})
    assert by_kind(manifests, "RayCluster") == {}
    job = by_kind(manifests, "RayJob")["clicks"]["spec"]
    assert shlex.split(job["entrypoint"]) == ["python3", "/my run.py", *words]
    assert job["shutdownAfterJobFinishes"] is True
    served = by_kind(render_ray(_VALUES), "RayCluster")["clicks"]["spec"]
    assert job["rayClusterSpec"] == served


def test_other_pods_reach_the_port_for_jobs_only_if_asked() -> None:
    def rules(**values: object) -> list[dict[str, Any]]:
        policy = by_kind(render_ray({**_VALUES, **values}), "NetworkPolicy")["clicks"]["spec"]
        return policy["ingress"]

    own, operator = rules()
    assert own == {"from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "clicks"}}}]}
    assert operator["ports"] == [{"port": 8265}]
    (source,) = operator["from"]
    assert source["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
    assert rules(expose_jobs=True) == [own, {"ports": [{"port": 8265}]}]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ps_replicas", 0, "at least 1"),
        ("memory_per_task", "much", "a size such as 4Gi"),
        ("ray_version", "new", "a version such as"),
        ("token_secret", "No Secret", "the name of a secret"),
        ("train_dir", "/out", "has no variable 'train_dir'"),
        ("name", "a" * 54, "The name of the RayCluster, (?s:.)*at most 53"),
    ],
)
def test_value_that_cannot_work_is_refused(variable, value, words) -> None:
    with pytest.raises(ValueError, match=words):
        render_ray({variable: value})


def test_name_of_a_job_has_a_limit_of_its_own() -> None:
    assert "kind: RayJob" in render_ray({"name": "a" * 47, "script": "/a.py"})
    with pytest.raises(ValueError, match=r"The name of the RayJob, (?s:.)*at most 47"):
        render_ray({"name": "a" * 48, "script": "/a.py"})


def test_template_of_ones_own_is_rendered() -> None:
    own = ray_template().replace('memory_per_task = "4Gi"', 'memory_per_task = "64Gi"')
    assert 'memory: "64Gi"' in render_ray(template=own)
