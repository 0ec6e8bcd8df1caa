"""Rendered manifests: valid for Kubernetes, and every pod finds its task in the cluster."""

from __future__ import annotations

import itertools

import pytest

from stratagem.cli.input_service import command
from stratagem.cli.manifests.kubernetes import (
    kubernetes_template,
    kubernetes_versions,
    render_kubernetes,
    validate_kubernetes,
)
from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver
from stratagem.group.authentication.secret import Secret
from tests.unit.cli.manifests.definitions import open_definitions
from tests.unit.cli.manifests.kubelet import StartedPod, by_kind, started_pods

OLDEST = "1.29"
SIZES = [
    *(("Job", *size) for size in itertools.product((1, 3, 16), (0, 2), (False, True))),
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
def test_manifests_are_valid_and_every_task_reads_itself(
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
    for version in (OLDEST, kubernetes_versions()[-1]):
        assert validate_kubernetes(manifests, version, open_definitions()) == []

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


def test_user_who_edits_one_line_gets_three_workers() -> None:
    edited = kubernetes_template().replace("worker_replicas = 2", "worker_replicas = 3")
    manifests = render_kubernetes({"run_secret": "ours"}, template=edited)
    assert len(list(started_pods(manifests))) == 3
    assert manifests == render_kubernetes({"run_secret": "ours", "worker_replicas": 3})
    assert manifests == render_kubernetes({"run_secret": "ours", "worker_replicas": "3"})


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
    assert validate_kubernetes(manifests) == []


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
    for version in (OLDEST, kubernetes_versions()[-1]):
        assert validate_kubernetes(manifests, version, open_definitions()) == []
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
        name: command.make_context("input-service", [*container["command"][4:], *container["args"]])
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
    ("--epochs 5", ["--epochs", "5"]),
    ("", []),
    ("""--text 'a b' --json '{"a": [1, "x"]}' """, ["--text", "a b", "--json", '{"a": [1, "x"]}']),
    ([], []),
    (["--a b", "'", '"', "\\", "{{ x }}", "# no comment", ": ", "- ", "&a *b !c %d @e"], None),
    (["$(HOME)", "$$(HOME)", "$HOME", "$", "$$", "$(JOB_COMPLETION_INDEX)", "a$(b"], None),
    (
        ["gr\u00fc\u00df dich", "\u65e5\u672c", "\U0001f600", "line\nline", "tab\t", "\x7f\x85"],
        None,
    ),
    (["\u2028\ufeff", "yes", "null", "1e3", "0x10", "~", ""], None),
]


@pytest.mark.parametrize(("given", "words"), ARGUMENTS)
def test_arguments_reach_the_script_as_they_were_given(given, words) -> None:
    manifests = _render(cmdline_args=given, worker_replicas=1, script="my $(script)'s\".py")
    pod = _only_pod(manifests)
    assert pod.arguments == (given if words is None else words)
    assert pod.container["command"] == ["python3", "my $$(script)'s\".py"]
    assert validate_kubernetes(manifests) == []


@pytest.mark.parametrize("name", ["null", "yes", "a", "true", "on", "y"])
def test_name_that_yaml_would_take_for_something_else_stays_a_name(name) -> None:
    assert validate_kubernetes(render_kubernetes({"name": name, "has_tensorboard": True})) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"name": "My_Train"}, r"name='My_Train' is not valid(?s:.)*a DNS label: lowercase"),
        ({"name": "1train"}, "starting with a letter"),
        ({"name": "a" * 55}, r"The name of the last worker, 'a+-worker-1', has 64(?s:.)*most 63"),
        (
            {"worker_replicas": 9999},
            r"would be \d+ bytes long(?s:.)*at most 131072(?s:.)*fewer tasks",
        ),
        ({"worker_replicas": 0}, "an integer of at least 1"),
        ({"worker_replicas": "-3"}, "an integer of at least 1"),
        (
            {"worker_replicas": "two"},
            r"worker_replicas='two' has a different type than 2(?s:.)*an integer",
        ),
        ({"worker_replicas": 2.0}, "worker_replicas=2.0 is not valid"),
        ({"ps_replicas": -1}, "ps_replicas=-1 is not valid"),
        ({"has_eval": "maybe"}, r"has_eval='maybe' has a different type(?s:.)*true or false"),
        ({"has_eval": 1}, "has_eval=1 is not valid"),
        ({"port": 0}, "a port from 1 to 65535"),
        ({"port": 65536}, "a port from 1 to 65535"),
        ({"image": "a b"}, "the name of a container image"),
        ({"image": ""}, "the name of a container image"),
        ({"script": ""}, "the path of a file"),
        ({"train_dir": "relative"}, "a folder as /path, or a URL"),
        ({"train_dir": "/"}, "a folder as /path, or a URL"),
        ({"cmdline_args": "'open"}, r"cannot be split into words: No closing quotation"),
        ({"cmdline_args": "\ud800"}, "text, or a list of words"),
        ({"cmdline_args": ["a\0"]}, "text, or a list of words"),
        ({"volume_size": "much"}, "a size such as 10Gi"),
        ({"volume_access_mode": "ReadOnly"}, "ReadWriteMany or ReadWriteOnce"),
        ({"storage_class": "A B"}, "the name of a storage class"),
        ({"credential_secret_key": "A"}, "the name of a secret"),
        ({"credential_secret_json": "a/b"}, "the name of a file"),
        ({"workload": "Deployment"}, "Job, JobSet or TrainJob"),
        ({"queue": "Gold"}, "the name of a LocalQueue"),
        ({"queue": "a" * 64}, "of at most 63 characters"),
        ({"user_id": 0}, "the number of a user other than root"),
        ({"max_evictions": -1}, "an integer of at least 0"),
        ({"memory_per_task": "much"}, "a size such as 4Gi"),
        ({"workload": "JobSet", "name": "a" * 53}, "'a+-worker-0-1', has 64"),
        ({"workers": 3}, r"template.yaml.jinja has no variable 'workers'(?s:.)*worker_replicas"),
    ],
)
def test_value_that_cannot_work_is_named(overrides, message) -> None:
    with pytest.raises(ValueError, match=message):
        render_kubernetes(overrides)


def test_longest_name_that_fits_is_rendered() -> None:
    name = "a" * (63 - len("-worker-1"))
    assert validate_kubernetes(render_kubernetes({"name": name})) == []
    with pytest.raises(ValueError, match=r"The name of the last evaluator, (?s:.)*shorter name"):
        render_kubernetes({"name": name, "has_eval": True})


def test_wrong_value_in_an_edited_head_is_named() -> None:
    edited = kubernetes_template().replace("worker_replicas = 2", 'worker_replicas = "2"')
    with pytest.raises(ValueError, match="worker_replicas='2' is not valid"):
        render_kubernetes(template=edited)


def test_older_kubernetes_is_refused() -> None:
    problems = validate_kubernetes(_render(), "1.27")
    assert {problem.document for problem in problems} == {"Job/train-worker"}
    (unknown,) = (problem for problem in problems if problem.path == "spec")
    assert "'backoffLimitPerIndex', 'maxFailedIndexes' were unexpected" in unknown.message


def _secrets(manifests: str) -> set[str]:
    return {pod.environment["STRATAGEM_SECRET"] for pod in started_pods(manifests)}


def test_all_tasks_of_a_rendering_share_a_secret_of_its_own() -> None:
    first, second = (_secrets(_render(ps_replicas=1, has_eval=True)) for _ in range(2))
    assert (len(first), len(first | second)) == (1, 2)
    Secret(*first)


def test_secret_of_the_cluster_is_used_and_none_is_rendered() -> None:
    manifests = _render(run_secret="ours")
    assert by_kind(manifests, "Secret") == {}
    assert _secrets(manifests) == {""}
    assert 'secretKeyRef:\n              name: "ours"\n              key: secret\n' in manifests
