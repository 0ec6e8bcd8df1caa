"""Rendered manifests: valid for Kubernetes, and every pod finds its task in the cluster."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from stratagem.cli.manifests.rendering import (
    kubernetes_template,
    ray_template,
    render_kubernetes,
    render_ray,
)
from stratagem.cli.server import input_service_command
from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver
from stratagem.group.authentication.secret import Secret
from tests.unit.cli.manifests.kubelet import StartedPod, by_kind, documents, pod_specs, started_pods
from tests.unit.cli.manifests.schemas import NEWEST, OLDEST, mistakes

SIZES = [
    *(("Job", *size) for size in ((1, 0, False), (3, 0, True), (16, 2, False), (3, 2, True))),
    *((workload, 3, 2, True) for workload in ("JobSet", "TrainJob")),
]
HOSTS = {
    "Job": "train-{role}-{index}.train-{role}",
    "JobSet": "train-{role}-0-{index}.train",
    "TrainJob": "train-{job}-0-{index}.train",
}


def _render(**overrides: object) -> str:
    return render_kubernetes({"name": "train", **overrides})


def _only_pod(manifests: str) -> StartedPod:
    (pod,) = started_pods(manifests)
    return pod


@pytest.mark.parametrize(("workload", "workers", "servers", "has_eval"), SIZES)
def test_every_task_of_a_valid_manifest_reads_itself(
    monkeypatch, workload, workers, servers, has_eval
) -> None:
    manifests = _render(
        workload=workload,
        worker_replicas=workers,
        ps_replicas=servers,
        has_eval=has_eval,
        has_tensorboard=has_eval,
        num_gpus_per_worker=servers,
    )
    for version in (OLDEST, NEWEST):
        assert mistakes(manifests, version) == []

    cluster = {
        role: [
            HOSTS[workload].format(role=role, job=job, index=index) + ":5000"
            for index in range(count)
        ]
        for role, job, count in (
            *(("worker", "node", workers), ("ps", "ps", servers)),
            ("evaluator", "evaluator", int(has_eval)),
        )
        if count
    }
    read = []
    for pod in started_pods(manifests):
        monkeypatch.setenv("TF_CONFIG", pod.environment["TF_CONFIG"])
        resolver = TFConfigClusterResolver()
        assert resolver.cluster_spec() == cluster
        task_type, index = resolver.task_type, resolver.task_id
        read.append((task_type, index))
        address = resolver.cluster_spec().task_address(str(task_type), int(index or 0))
        assert address == f"{pod.host}:{pod.container['ports'][0]['containerPort']}"
        if task_type == "worker":
            assert resolver.processes() == Processes(workers, index, cluster["worker"][0])
    expected = [(job, index) for job, tasks in cluster.items() for index in range(len(tasks))]
    assert sorted(read) == sorted(expected)


def test_each_pod_answers_at_its_name_through_a_headless_service() -> None:
    manifests = _render(worker_replicas=3, ps_replicas=2, has_eval=True)
    services = by_kind(manifests, "Service")
    for pod in started_pods(manifests):
        service = services[pod.host.partition(".")[2]]["spec"]
        assert service["clusterIP"] == "None"
        assert service["publishNotReadyAddresses"] is True
        assert service["selector"].items() <= pod.labels.items()
        assert [port["port"] for port in service["ports"]] == [5000]
    others = [service["spec"]["selector"] for service in services.values()]
    assert len({selector["app.kubernetes.io/component"] for selector in others}) == 3


def test_head_s_names_and_defaults_are_those_of_tensorflow_s_template() -> None:
    head = kubernetes_template().split("end of the head")[0]
    for line in (
        'name = "dist-strat-example"',
        "worker_replicas = 2",
        "ps_replicas = 0",
        "num_gpus_per_worker = 2",
        "has_eval = False",
        "has_tensorboard = False",
        "cmdline_args = train_dir",
        'credential_secret_json = "key.json"',
        'credential_secret_key = "credential"',
        "port = 5000",
    ):
        assert f"{{% set {line} -%}}" in head
    for name in ("image", "train_dir", "script"):
        assert f"{{% set {name} = " in head
    for macro in ("worker_hosts()", "ps_hosts()", "tf_config(task_type, task_id)"):
        assert f"{{% macro {macro}" in kubernetes_template()


def test_gpus_are_limited_on_workers_and_the_evaluator_only() -> None:
    manifests = _render(ps_replicas=1, has_eval=True, num_gpus_per_worker=4)
    limits = {
        pod.container["name"]: pod.container.get("resources", {}).get("limits")
        for pod in started_pods(manifests)
    }
    gpus = {"nvidia.com/gpu": 4}
    assert limits == {"worker": gpus, "evaluator": gpus, "ps": None}
    memory = {
        pod.container["name"]: [v for v in pod.spec["volumes"] if v.get("emptyDir")]
        for pod in started_pods(manifests)
    }
    assert memory["ps"] == []
    assert memory["worker"] == [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    assert "nvidia.com" not in _render(num_gpus_per_worker=0)
    assert "shared-memory" not in _render(num_gpus_per_worker=0)


@pytest.mark.parametrize("workload", ["Job", "JobSet", "TrainJob"])
def test_workers_are_the_hosts_of_a_tpu_slice_of_gke(workload) -> None:
    manifests = _render(
        workload=workload,
        worker_replicas=4,
        ps_replicas=1,
        tpu_accelerator="tpu-v5-lite-podslice",
        tpu_topology="4x4",
    )
    assert mistakes(manifests) == mistakes(manifests, NEWEST) == []
    for pod in started_pods(manifests):
        is_host = pod.labels["app.kubernetes.io/component"] == "worker"
        limits = pod.container.get("resources", {}).get("limits")
        assert limits == ({"google.com/tpu": 4} if is_host else None)
        assert pod.spec.get("nodeSelector") == (
            {
                "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
                "cloud.google.com/gke-tpu-topology": "4x4",
            }
            if is_host
            else None
        )
    assert "google.com/tpu" not in _render(workload=workload)


def test_jobs_start_lost_tasks_again_and_end_for_good_on_wrong_arguments() -> None:
    manifests = _render(worker_replicas=4, has_eval=True, max_restarts=7, grace_period_s=300)
    jobs = by_kind(manifests, "Job")
    assert set(jobs) == {"train-worker", "train-evaluator"}
    for job in jobs.values():
        spec = job["spec"]
        # An incident costs every task one failure: counted together, 4 tasks would have 7 / 4.
        assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (7, 0)
        assert "backoffLimit" not in spec
        actions = {
            str(rule.get("onExitCodes", {}).get("values")): rule["action"]
            for rule in spec["podFailurePolicy"]["rules"]
        }
        assert actions == {"None": "Ignore", "[42]": "Ignore", "[2]": "FailJob"}
        # Required by a failure policy.
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 300
        (container,) = spec["template"]["spec"]["containers"]
        assert {"name": "STRATAGEM_POD_GRACE_S", "value": "300"} in container["env"]


def test_servers_are_always_started_again_and_only_they_have_a_probe() -> None:
    manifests = _render(ps_replicas=2, has_eval=True)
    pods = list(started_pods(manifests))
    assert {pod.container["name"]: "readinessProbe" in pod.container for pod in pods} == {
        "worker": False,
        "evaluator": False,
        "ps": True,
    }
    for pod in pods:
        assert not {"livenessProbe", "startupProbe"} & pod.container.keys()
    (stateful,) = by_kind(manifests, "StatefulSet").values()
    assert "restartPolicy" not in stateful["spec"]["template"]["spec"]  # Always
    assert stateful["spec"]["podManagementPolicy"] == "Parallel"


def test_checkpoints_are_on_one_volume_for_all() -> None:
    manifests = _render(
        ps_replicas=1, has_eval=True, has_tensorboard=True, volume_size="1.5Ti", storage_class="nfs"
    )
    ((name, claim),) = by_kind(manifests, "PersistentVolumeClaim").items()
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "nfs",
        "resources": {"requests": {"storage": "1.5Ti"}},
    }
    (tensorboard,) = by_kind(manifests, "Deployment").values()
    specs = [pod.spec for pod in started_pods(manifests)]
    for spec in (*specs, tensorboard["spec"]["template"]["spec"]):
        (volume,) = (v for v in spec["volumes"] if "persistentVolumeClaim" in v)
        assert volume["persistentVolumeClaim"] == {"claimName": name}
        mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
        assert mounts[volume["name"]] == "/checkpoints"


def test_folder_in_a_bucket_needs_no_volume() -> None:
    manifests = _render(train_dir="gs://bucket/run-1")
    assert by_kind(manifests, "PersistentVolumeClaim") == {}
    manifests = _render(
        train_dir="gs://bucket/run",
        credential_secret_key="",
        num_gpus_per_worker=0,
        worker_replicas=1,
    )
    pod = _only_pod(manifests)
    assert pod.spec["volumes"] == [{"name": "temporary", "emptyDir": {}}]
    assert pod.container["volumeMounts"] == [{"name": "temporary", "mountPath": "/tmp"}]
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in pod.environment
    assert pod.arguments == ["gs://bucket/run"]
    assert mistakes(manifests) == []


def test_credential_is_mounted_where_google_s_libraries_look() -> None:
    manifests = _render(credential_secret_key="mine", credential_secret_json="a.json")
    for pod in started_pods(manifests):
        assert pod.environment["GOOGLE_APPLICATION_CREDENTIALS"] == "/var/secrets/google/a.json"
        (volume,) = (v for v in pod.spec["volumes"] if "secret" in v)
        # Not optional, pods would wait for ever where there is no such secret.
        assert volume["secret"] == {"secretName": "mine", "optional": True}


def test_tensorboard_reads_the_folder_and_answers_at_the_port() -> None:
    manifests = _render(has_tensorboard=True, port=6000, train_dir="/logs")
    (deployment,) = by_kind(manifests, "Deployment").values()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--logdir", "/logs", "--port", "6000", "--bind_all"]
    assert container["readinessProbe"] == {"httpGet": {"path": "/", "port": "http"}}
    assert container["ports"] == [{"name": "http", "containerPort": 6000}]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    service = by_kind(manifests, "Service")["train-tensorboard"]["spec"]
    assert service["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels


def test_input_workers_join_their_dispatcher_and_tasks_find_it() -> None:
    manifests = _render(input_replicas=3, port=6000, cpus_per_task=2)
    for version in (OLDEST, NEWEST):
        assert mistakes(manifests, version) == []
    for pod in started_pods(manifests):
        assert pod.environment["STRATAGEM_INPUT_SERVICE"] == "train-input:6000"
    found = by_kind(manifests, "Deployment")
    replicas = {name: one["spec"]["replicas"] for name, one in found.items()}
    assert replicas == {"train-input": 1, "train-input-worker": 3}
    pod = found["train-input"]["spec"]["template"]
    service = by_kind(manifests, "Service")["train-input"]["spec"]
    assert service["selector"] == pod["metadata"]["labels"]
    assert service["ports"] == [{"name": "dispatcher", "port": 6000}]
    commands = {
        name: input_service_command.make_context(
            "input-service", [*container["command"][4:], *container["args"]]
        )
        for name, one in found.items()
        for container in one["spec"]["template"]["spec"]["containers"]
    }
    dispatcher, worker = commands["train-input"].params, commands["train-input-worker"].params
    assert (dispatcher["workers"], dispatcher["port"], dispatcher["host"]) == (0, 6000, "$(POD_IP)")
    assert (worker["workers"], worker["dispatcher"]) == (1, "train-input:6000")
    assert "input" not in _render()


def test_exposed_tasks_have_a_load_balancer_each() -> None:
    manifests = _render(worker_replicas=2, ps_replicas=1, expose_tasks=True)
    services = by_kind(manifests, "Service")
    for pod in started_pods(manifests):
        service = services[pod.host.partition(".")[0]]["spec"]
        assert service["type"] == "LoadBalancer"
        others = [
            other
            for other in started_pods(manifests)
            if service["selector"].items() <= other.labels.items()
        ]
        assert [other.host for other in others] == [pod.host]


ARGUMENTS = [
    ("", []),
    ("""--text 'a b' --json '{"a": [1, "x"]}' """, ["--text", "a b", "--json", '{"a": [1, "x"]}']),
    ([], []),
    (["--a b", "'", '"', "\\", "{{ x }}", "# no comment", ": ", "- ", "&a *b !c %d @e"], None),
    (["$(HOME)", "$$(HOME)", "$HOME", "$", "$$", "$(JOB_COMPLETION_INDEX)", "a$(b"], None),
    (
        ["gr\u00fc\u00df dich", "\u65e5\u672c", "\U0001f600", "line\nline", "tab\t", "\x7f\x85"],
        None,
    ),
    (["\u2028\u2029\ufeff\ufffe", "yes", "null", "1e3", "0x10", "~", ""], None),
    (["\x07\t\r\x1b\x80\x85\xa0\xad\U000e0001", "\"'\\", "a: b # c", "{% y %}"], None),
]


@pytest.mark.parametrize(("given", "words"), ARGUMENTS)
def test_arguments_reach_the_script_as_they_were_given(given, words) -> None:
    manifests = _render(cmdline_args=given, worker_replicas=1, script="my $(script)'s\".py")
    pod = _only_pod(manifests)
    assert pod.arguments == (given if words is None else words)
    assert pod.container["command"] == ["python3", "my $$(script)'s\".py"]
    assert mistakes(manifests) == []


@pytest.mark.parametrize("name", ["null", "yes", "a" * (63 - len("-tensorboard"))])
def test_name_that_yaml_would_take_for_something_else_and_a_long_one_stay_names(name) -> None:
    assert mistakes(render_kubernetes({"name": name, "has_tensorboard": True})) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"name": "My_Train"}, r"name='My_Train' is not valid(?s:.)*lowercase letters, digits"),
        ({"name": "1train"}, "a letter first"),
        (
            {"worker_replicas": 9999},
            r"would be \d+ bytes long(?s:.)*at most 131072(?s:.)*fewer tasks",
        ),
        ({"worker_replicas": 0}, "an integer of at least 1"),
        ({"worker_replicas": 2.0}, "worker_replicas=2.0 is not valid"),
        ({"ps_replicas": -1}, "ps_replicas=-1 is not valid"),
        ({"has_eval": 1}, "has_eval=1 is not valid(?s:.)*True or False"),
        ({"port": 0}, "an integer of at least 1"),
        ({"image": 7}, "image=7 is not valid(?s:.)*text"),
        ({"script": ""}, "the path of a file"),
        ({"train_dir": "relative"}, "a folder as /path, or a URL"),
        ({"train_dir": "/"}, "a folder as /path, or a URL"),
        ({"cmdline_args": "\ud800"}, "cmdline_args='.*' is not valid(?s:.)*text"),
        ({"cmdline_args": ["a\0"]}, "text, or a list of words"),
        ({"workload": "Deployment"}, "Job, JobSet or TrainJob"),
        ({"user_id": 0}, "an integer of at least 1"),
        ({"tpu_topology": "4 by 4"}, "a topology such as 4x4"),
        ({"workers": 3}, r"template.yaml.jinja has no variable 'workers'(?s:.)*worker_replicas"),
    ],
)
def test_value_that_cannot_work_is_named(overrides, message) -> None:
    with pytest.raises(ValueError, match=message):
        render_kubernetes(overrides)


def _secrets(manifests: str) -> set[str]:
    return {pod.environment["STRATAGEM_SECRET"] for pod in started_pods(manifests)}


def test_all_tasks_of_a_rendering_share_a_secret_of_its_own_or_of_the_cluster() -> None:
    first, second = (_secrets(_render(ps_replicas=1, has_eval=True)) for _ in range(2))
    assert (len(first), len(first | second)) == (1, 2)
    Secret(*first)
    manifests = _render(run_secret="ours")
    assert by_kind(manifests, "Secret") == {}
    assert _secrets(manifests) == {""}
    assert 'secretKeyRef:\n              name: "ours"\n              key: secret\n' in manifests


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


def test_home_and_temporary_files_are_on_a_volume_and_the_root_is_writable_if_asked(form) -> None:
    for spec in pod_specs(form(read_only_root=False)):
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is False
        assert {"name": "HOME", "value": "/tmp"} in container["env"]
        assert {"name": "temporary", "mountPath": "/tmp"} in container["volumeMounts"]
        assert {"name": "temporary", "emptyDir": {}} in spec["volumes"]
        names = [volume["name"] for volume in spec["volumes"]]
        assert sorted(names) == sorted(mount["name"] for mount in container["volumeMounts"])


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


def test_kueue_s_topology_is_asked_for_by_the_pods_of_workers(form) -> None:
    label = "cloud.provider.com/topology-rack"
    marked = form(required_topology=label, preferred_topology="cloud.provider.com/topology-block")
    found = _annotated(documents(marked))
    assert found == [
        {
            "kueue.x-k8s.io/podset-required-topology": label,
            "kueue.x-k8s.io/podset-preferred-topology": "cloud.provider.com/topology-block",
        }
    ]
    assert mistakes(marked, NEWEST) == []


def _annotated(value: Any) -> list[dict[str, str]]:
    """Annotations of all templates of pods in a document that have some."""
    if not isinstance(value, dict | list):
        return []
    parts = value if isinstance(value, list) else value.values()
    own = value.get("metadata", {}) if isinstance(value, dict) and "spec" in value else {}
    return [*filter(None, [own.get("annotations")])] + [
        one for part in parts for one in _annotated(part)
    ]


@pytest.mark.parametrize("workload", ["JobSet", "TrainJob"])
def test_job_set_restarts_in_place_with_its_agent(workload) -> None:
    manifests = FORMS[workload](restart_agent="registry/agent:v0.12.0", max_restarts=7)
    assert mistakes(manifests, NEWEST) == []
    spec = next(
        one["spec"] if workload == "JobSet" else one["spec"]["template"]["spec"]
        for one in documents(manifests)
        if one["kind"] in ("JobSet", "TrainingRuntime")
    )
    policy = spec["failurePolicy"]
    assert (policy["restartStrategy"], policy["maxRestarts"]) == ("InPlaceRestart", 7)
    for job in (one["template"]["spec"] for one in spec["replicatedJobs"]):
        # What JobSet's webhook asks for.
        assert job["backoffLimit"] == 2**31 - 1
        assert job["podReplacementPolicy"] == "Failed"
        assert job["completions"] == job["parallelism"]
        assert not {"backoffLimitPerIndex", "maxFailedIndexes"} & job.keys()
        pod = job["template"]["spec"]
        (agent,), (task,) = pod["initContainers"], pod["containers"]
        assert agent["image"] == "registry/agent:v0.12.0"
        assert task["restartPolicyRules"][0]["exitCodes"]["values"] == [0, 2]
        token = "/var/run/secrets/kubernetes.io/serviceaccount"
        has_token = [
            any(mount["mountPath"] == token for mount in one["volumeMounts"])
            for one in (agent, task)
        ]
        assert has_token == [True, False]
    assert "initContainers" not in FORMS["Job"](restart_agent="registry/agent:v0.12.0")


# KubeRay manifests.

_VALUES = {"name": "clicks", "worker_replicas": 4, "ps_replicas": 3, "num_gpus_per_worker": 8}


@pytest.fixture
def cluster() -> dict[str, Any]:
    return copy.deepcopy(by_kind(render_ray(_VALUES), "RayCluster")["clicks"])


def _groups(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    spec = cluster["spec"]
    named = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"], **named}


def test_each_role_is_a_group_of_its_size_whose_pods_have_the_token(cluster) -> None:
    groups = _groups(cluster)
    sizes = {name: group.get("replicas") for name, group in groups.items()}
    assert sizes == {"head": None, "ps": 3, "worker": 4}
    assert groups["head"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "clicks-token"}
    for role, group in groups.items():
        (container,) = group["template"]["spec"]["containers"]
        gpus = {"nvidia.com/gpu": 8} if role == "worker" else {}
        assert container["resources"]["limits"] == {"memory": "4Gi", **gpus}
        variables = {one["name"]: one for one in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        key = {"name": "clicks-token", "key": "auth_token"}
        assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == key
        if role != "head":
            # The operator writes the values behind an equals sign into a command of a shell.
            (word,) = shlex.split("--resources=" + group["rayStartParams"]["resources"])
            assert json.loads(word.partition("=")[2]) == {role: 1}


def test_service_leads_to_the_port_for_jobs(cluster) -> None:
    service = by_kind(render_ray({**_VALUES, "port": 9000}), "Service")["clicks-jobs"]
    assert service["spec"]["ports"] == [{"name": "jobs", "port": 9000, "targetPort": "dashboard"}]
    head = cluster["spec"]["headGroupSpec"]["template"]
    assert service["spec"]["selector"] == head["metadata"]["labels"]
    (container,) = head["spec"]["containers"]
    assert "dashboard" in {port["name"] for port in container["ports"]}


def test_all_of_it_is_valid() -> None:
    for version in (OLDEST, NEWEST):
        for values in (_VALUES, {"num_gpus_per_worker": 0}, {"script": "/a.py", "queue": "gold"}):
            assert mistakes(render_ray(values), version) == []


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


def test_value_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="an integer of at least 1"):
        render_ray({"ps_replicas": 0})
    with pytest.raises(ValueError, match="has no variable 'train_dir'"):
        render_ray({"train_dir": "/out"})


def test_template_of_ones_own_is_rendered() -> None:
    own = ray_template().replace('memory_per_task = "4Gi"', 'memory_per_task = "64Gi"')
    assert 'memory: "64Gi"' in render_ray(template=own)
