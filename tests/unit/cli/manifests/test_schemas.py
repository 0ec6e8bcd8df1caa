"""Schema validation, compared with the verdicts of kubernetes-validate."""

from __future__ import annotations

import copy
import re
import string
import sys
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stratagem.cli.manifests.kubernetes import (
    expand,
    kubernetes_versions,
    pods_of,
    render_kubernetes,
    schema_problems,
    validate_kubernetes,
)
from stratagem.cli.manifests.rendering import Template
from tests.unit.cli.manifests.kubelet import documents, expanded, started_pods
from tests.unit.cli.manifests.mutations import mutations

_EVERYTHING = documents(
    render_kubernetes(
        {
            "name": "train",
            "ps_replicas": 1,
            "has_eval": True,
            "has_tensorboard": True,
            "expose_tasks": True,
        }
    )
)
_SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "a"},
    "spec": {"ports": [{"port": 5000}]},
}


def _changed(*path: str | int, value: object) -> dict[str, Any]:
    document = copy.deepcopy(_SERVICE)
    place: Any = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return document


def test_versions_are_in_order_and_reach_to_the_newest() -> None:
    versions = kubernetes_versions()
    assert versions == sorted(versions, key=lambda version: int(version.split(".")[1]))
    assert versions[-1] == ".".join(kubernetes_validate.latest_version().split(".")[:2])
    assert "1.29" in versions


@pytest.mark.parametrize("version", ["1.29", "1.33"])
def test_all_kinds_are_right_by_the_package_s_own_verdict(version) -> None:
    assert {document["kind"] for document in _EVERYTHING} == {
        "Deployment",
        "Job",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
        "Secret",
        "Service",
        "StatefulSet",
    }
    for document in _EVERYTHING:
        assert schema_problems(document, version) == []
        assert kubernetes_validate.validate(document, version, strict=True) == version


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        (_changed("spec", "prots", value=[]), "spec", "'prots' was unexpected"),
        (_changed("spec", "ports", 0, "port", value="http"), "spec.ports[0].port", "not of type"),
        (_changed("spec", "ports", 0, value={}), "spec.ports[0]", "'port' is a required property"),
        (_changed("metadata", "name", value=5), "metadata.name", "not of type"),
        (_changed("apiVersion", value="v2"), "", "Kubernetes 1.33 has no Service in v2"),
        (_changed("kind", value="Serfice"), "", "Kubernetes 1.33 has no Serfice in v1"),
    ],
)
def test_what_the_schema_does_not_allow_is_named_with_its_place(document, path, message) -> None:
    (problem,) = schema_problems(document, "1.33")
    assert (problem.document.partition("/")[0], problem.path) == (document["kind"], path)
    assert message in problem.message
    with pytest.raises(
        (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)
    ):
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_value_that_has_none_of_several_forms_is_named_with_its_place() -> None:
    claim = next(d for d in _EVERYTHING if d["kind"] == "PersistentVolumeClaim")
    wrong = copy.deepcopy(claim)
    wrong["spec"]["resources"]["requests"]["storage"] = ["10Gi"]
    (problem,) = schema_problems(wrong, "1.33")
    assert problem.path == "spec.resources.requests.storage"
    assert problem.message.startswith("['10Gi'] is not valid")


@pytest.mark.parametrize("kind", sorted({document["kind"] for document in _EVERYTHING}))
def test_every_wrong_variant_of_a_rendered_document_is_refused(kind) -> None:
    document = next(one for one in _EVERYTHING if one["kind"] == kind)
    accepted = [name for name, one in mutations(document) if not schema_problems(one, "1.37")]
    assert accepted == []


def test_enumerations_that_the_published_schemas_leave_out_are_checked() -> None:
    job = copy.deepcopy(next(one for one in _EVERYTHING if one["kind"] == "Job"))
    pod = job["spec"]["template"]["spec"]
    pod["restartPolicy"] = "never"
    pod["securityContext"]["seccompProfile"]["type"] = "Default"
    job["spec"]["podFailurePolicy"]["rules"][0]["action"] = "Skip"
    assert {problem.path for problem in schema_problems(job, "1.33")} == {
        "spec.template.spec.restartPolicy",
        "spec.template.spec.securityContext.seccompProfile.type",
        "spec.podFailurePolicy.rules[0].action",
    }
    assert kubernetes_validate.validate(job, "1.33", strict=True) == "1.33"


@pytest.mark.parametrize(
    ("size", "is_valid"), [("10Gi", True), (".5", True), ("1e3", True), ("ten", False), ("", False)]
)
def test_quantity_has_the_form_of_one(size, is_valid) -> None:
    claim = copy.deepcopy(next(d for d in _EVERYTHING if d["kind"] == "PersistentVolumeClaim"))
    claim["spec"]["resources"]["requests"]["storage"] = size
    assert (schema_problems(claim, "1.33") == []) == is_valid


def test_all_mistakes_of_a_document_are_reported() -> None:
    document = _changed("spec", "prots", value=[])
    document["metadata"]["owner"] = "a"
    assert {problem.path for problem in schema_problems(document, "1.33")} == {"spec", "metadata"}


@pytest.mark.parametrize(
    "document", [{}, {"kind": "Job"}, {"kind": 3, "apiVersion": "v1"}, {"apiVersion": "v1"}]
)
def test_document_without_a_kind_is_named(document) -> None:
    (problem,) = schema_problems(document, "1.33")
    assert problem.message == "kind or apiVersion is missing"


@pytest.mark.parametrize("kind", ["../service", "Service/", "a b", ""])
def test_kind_that_is_not_a_name_is_not_a_file(kind) -> None:
    (problem,) = schema_problems(_changed("kind", value=kind), "1.33")
    assert problem.message == f"Kubernetes 1.33 has no {kind} in v1"


def test_version_that_is_not_installed_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"schemas of Kubernetes '1.7' are not installed(?s:.)*one of 1(?s:.)*1.33"
    ):
        schema_problems(_SERVICE, "1.7")


def test_library_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    document = _changed("kind", value="ConfigMap")  # a kind whose schema no other test has loaded
    with pytest.raises(ImportError, match=r"Validating manifests needs jsonschema, which"):
        schema_problems(document, "1.33")


# Templates: variables, overrides and errors.

_TEMPLATE = """{# a comment #}
{%- set name = "example" -%}
{%- set replicas = 2 -%}
{% set big = False %}
{% set share = 0.5 %}
{% set title = name ~ "!" %}
{% set words = ["a", "b"] %}
{% macro shown() %}
{{ name }} {{ replicas + 1 }} {{ big }} {{ title }} {{ words | join("+") }}
{% endmacro %}
{% set late = 1 %}
{{ shown() }}
"""


def test_variables_are_the_lines_at_the_top() -> None:
    assert Template(_TEMPLATE).variables == {
        "name": "example",
        "replicas": 2,
        "big": False,
        "share": 0.5,
        "title": "example!",
        "words": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        ({}, "example 3 False example! a+b"),
        ({"replicas": 7}, "example 8 False example! a+b"),
        ({"replicas": " -7 ", "big": "Yes"}, "example -6 True example! a+b"),
        ({"name": "7", "title": "t"}, "7 3 False t a+b"),
        ({"name": "x"}, "x 3 False x! a+b"),
        ({"words": "c 'd e'"}, "example 3 False example! c+d e"),
        ({"words": ["f"], "big": True}, "example 3 True example! f"),
    ],
)
def test_string_is_converted_to_the_type_in_the_template(overrides, shown) -> None:
    assert Template(_TEMPLATE).render(overrides).strip() == shown


@pytest.mark.parametrize("text", ["", "no variables", "{{ 1 }}{% set late = 1 %}"])
def test_template_without_variables_has_none(text) -> None:
    template = Template(text, "mine")
    assert template.variables == {}
    with pytest.raises(ValueError, match=r"mine has no variable 'late'(?s:.)*at the top of"):
        template.render({"late": 2})


def test_unknown_variables_are_all_named_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no variable 'a', 'b'(?s:.)*big, name, replicas, share"):
        Template(_TEMPLATE).values({"b": 1, "a": 1, "name": "x"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"replicas": "2.5"}, r"replicas='2.5' has a different type than 2(?s:.)*an integer"),
        ({"replicas": "+-2"}, "pass a value of that type for replicas"),
        ({"big": "2"}, r"big='2' has a different type than False(?s:.)*true or false"),
        ({"words": "it's"}, r"cannot be split into words(?s:.)*quotes in pairs"),
    ],
)
def test_string_of_another_type_is_named(overrides, message) -> None:
    with pytest.raises(ValueError, match=message):
        Template(_TEMPLATE).render(overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% set a = %}", "mine, line 1: "),
        ("ok\n{% if %}", "mine, line 2: "),
        (
            "{% set a = b %}",
            r"mine: variable 'a' is set from an undefined variable(?s:.)*set above it",
        ),
        ("{{ missing }}", "mine: 'missing' is undefined"),
        ("{{ 1 / 0 }}", "mine: division by zero"),
        ("{{ 'a' + 1 }}", "mine: can only concatenate"),
        ("{{ [][1] }}", "mine: "),
        ("{{ ''.__class__.__mro__ }}", "mine: access to attribute '__class__'"),
        ("{{ 'a \"' | shell_words }}", "mine: 'a \"' cannot be split into words"),
        ("{% include 'other' %}", "mine: "),
        ("{{ range(1000000) | list }}", "mine: Range too big"),
    ],
)
def test_wrong_template_is_named(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        Template(text, "mine").render()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "\"'\\",
        "a: b # c",
        "\x00\x07\t\n\r\x1b\x7f\x80\x85\xa0\xad",
        "\u2028\u2029\ufeff\ufffe",
        "gr\u00fc\u00df \u65e5 \U0001f600 \U000e0001",
        "{{ x }} {% y %} $(A)",
    ],
)
def test_quoted_text_is_read_back_from_yaml(text) -> None:
    rendered = Template('{% set value = "" %}\nkey: {{ value | quoted }}\n').render({"value": text})
    assert yaml.safe_load(rendered) == {"key": text}


def test_values_are_text_and_no_templates() -> None:
    template = Template('{% set value = "" %}{{ value }}')
    assert template.render({"value": "{{ 1 + 1 }}{% raw %}"}) == "{{ 1 + 1 }}{% raw %}"


def test_value_too_long_for_a_process_is_refused() -> None:
    template = Template('{% set value = "" %}{{ value | variable("NAME") }}')
    fits = "x" * (128 * 1024 - len("NAME=") - 1)
    assert template.render({"value": fits}) == fits
    with pytest.raises(
        ValueError,
        match=r"The environment variable NAME would be 131073 bytes long(?s:.)*at most 131072",
    ):
        template.render({"value": f"{fits}x"})


def test_rendering_library_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"Rendering needs jinja2(?s:.)*'stratagem\[clusters\]'"):
        Template("")


# Valid documents whose tasks would not find each other.

_MANIFESTS = render_kubernetes({"name": "t", "ps_replicas": 1, "has_eval": True})
_WORKER = "Job/t-worker: "
_ADDRESS = "'t-worker-1.t-worker:5000'"


def _problems(*changes: tuple[str, str], count: int = 1) -> list[str]:
    manifests = _MANIFESTS
    for pattern, replacement in changes:
        manifests, found = re.subn(pattern, replacement, manifests, count=count)
        assert found, f"{pattern!r} is not in the manifests"
    return [str(problem) for problem in validate_kubernetes(manifests)]


def test_rendered_manifests_have_no_problem() -> None:
    assert validate_kubernetes(_MANIFESTS) == []


@pytest.mark.parametrize(
    ("pattern", "replacement", "problem"),
    [
        (
            "completions: 2",
            "completions: 3",
            "pod t-worker-2: TF_CONFIG: task worker 2 is not in the",
        ),
        ("completions: 2", "completions: 1", "TF_CONFIG: worker 1: no pod runs this task"),
        (
            "completions: 2",
            "completions: 1",
            f"{_ADDRESS}: no pod of Service 't-worker' is named 't-wor",
        ),
        (
            "containerPort: 5000",
            "containerPort: 5001",
            f"the port of its address {_ADDRESS} is not a container port (5001)",
        ),
        (
            "subdomain: t-worker",
            "subdomain: t-ps",
            f"its address {_ADDRESS} does not match the pod t-worker-1.t-ps",
        ),
        (
            r"name: t-worker\n  labels",
            "name: other\n  labels",
            f"worker 1: {_ADDRESS}: no Service is named 't-worker'",
        ),
        (
            "component: worker\n  ports",
            "component: walker\n  ports",
            f"worker 1: {_ADDRESS}: Service 't-worker' does not select the pod",
        ),
        (
            r"JOB_COMPLETION_INDEX\)",
            "INDEX)",
            "pod t-worker-1: TF_CONFIG: not JSON with a cluster and a task",
        ),
        (r'\\"type\\"', r'\\"typ\\"', "(KeyError: 'type')"),
        (
            r'\\"worker\\", \\"index',
            r'\\"chief\\", \\"index',
            "task chief 1 is not in the cluster",
        ),
        (r'"{\\"cluster', r'"3{\\"cluster', "JSONDecodeError"),
        (r'value: "{\\"cluster.*"', 'value: "[]"', "(TypeError: "),
    ],
)
def test_mistake_is_reported_with_its_place(pattern, replacement, problem) -> None:
    found = _problems((pattern, replacement))
    assert any(problem in line for line in found), found
    assert any(line.startswith(_WORKER) for line in found)


def test_clusters_that_differ_are_reported() -> None:
    found = _problems(("t-worker-0.t-worker:5000", "t-worker-0.t-worker:5001"))
    assert "StatefulSet/t-ps: TF_CONFIG: its cluster differs from that of Job/t-worker" in found


def test_task_of_two_pods_is_reported() -> None:
    found = _problems((r'\\"evaluator\\", \\"index\\": ', r'\\"ps\\", \\"index\\": '), count=1)
    assert "TF_CONFIG: 2 pods run the same task, ps 0" in found
    assert any(line.endswith("evaluator 0: no pod runs this task") for line in found)


def test_variable_too_long_for_a_process_is_reported() -> None:
    long = "x" * (128 * 1024)
    found = _problems((r'(value: "{\\"cluster\\": {)', rf'\1\\"{long}\\": [], '))
    assert any("bytes, but Linux allows at most 131072" in line for line in found)


def test_each_problem_is_reported_once() -> None:
    found = _problems((r"name: t-worker\n  labels", "name: other\n  labels"))
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("addresses", "problems"),
    [
        (["10.0.0.1:5000", "10.0.0.2:5000"], []),
        (["[fd00::1]:5000", "[fd00::2]:5000"], []),
        (["a:5000", "a.default.svc:5000"], []),
        (["a:5000", "b:5000"], ["'b:5000': no Service is named 'b'"]),
        (["c:5000", "a:5000"], ["is a Service that does not select the pod"]),
    ],
)
def test_addresses_of_other_kinds(addresses, problems) -> None:
    hosts = ", ".join(f'"{address}"' for address in addresses)
    config = f'{{"cluster": {{"worker": [{hosts}]}}, "task": {{"type": "worker", "index": "0"}}}}'
    other = config.replace('"0"', '"1"')
    manifests = "".join(
        f"""
---
apiVersion: v1
kind: Pod
metadata: {{name: p{index}, labels: {{app: x}}}}
spec: {{containers: [{{name: c, image: i, env: [{{name: TF_CONFIG, value: '{text}'}}]}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: {service}}}
spec: {{selector: {{app: {selected}}}, ports: [{{port: 5000}}]}}
"""
        for index, text, service, selected in ((0, config, "a", "x"), (1, other, "c", "y"))
    )
    found = [problem.message for problem in validate_kubernetes(manifests)]
    assert len(found) == len(problems)
    for message, wanted in zip(found, problems, strict=True):
        assert wanted in message


def test_pods_without_tf_config_are_fine() -> None:
    plain = re.sub(r"name: TF_CONFIG", "name: OTHER", _MANIFESTS)
    assert validate_kubernetes(plain) == []


# Pods that documents create, with their environments.


@given(
    text=st.text(alphabet="$()AB x", max_size=20),
    variables=st.dictionaries(
        st.sampled_from(["A", "B", "AB", ""]), st.sampled_from(["", "1$$", "$(A)"])
    ),
)
def test_references_are_filled_in_letter_by_letter(text, variables) -> None:
    assert expand(text, variables) == expanded(text, variables)


@given(text=st.text(alphabet=string.printable))
def test_doubled_dollars_keep_any_text(text) -> None:
    assert expand(text.replace("$", "$$"), {"A": "1"}) == text


def test_value_known_to_the_cluster_only_makes_others_unknown() -> None:
    assert expand("a $(A)", {"A": None}) is None
    assert expand("a $$(A) $(B)", {"A": None, "B": "b"}) == "a $(A) b"


@pytest.mark.parametrize("workload", ["Job", "JobSet", "TrainJob"])
def test_rendered_pods_are_those_that_kubernetes_starts(workload) -> None:
    manifests = render_kubernetes(
        {"ps_replicas": 2, "has_eval": True, "worker_replicas": 3, "workload": workload}
    )
    key = "jobset.sigs.k8s.io/jobset-name"  # of the pods, but not of the templates
    found = {
        f"{pod.name}.{pod.domain}": (
            {name: value for name, value in pod.labels.items() if name != key},
            dict(pod.containers[0].environment),
        )
        for pod in pods_of(documents(manifests))
    }
    assert found == {
        pod.host: (pod.labels, {**pod.environment, "STRATAGEM_SECRET": None})
        for pod in started_pods(manifests)
    }


_OTHERS = """
kind: Pod
metadata: {name: alone}
spec:
  hostname: h
  subdomain: d
  containers:
  - name: a
    ports: [{containerPort: 1}, {containerPort: 2}]
    env:
    - {name: A, value: "$(B)"}
    - {name: B, value: "b"}
    - {name: C, value: "$(B)$(D)"}
    - {name: E, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    - {name: F, value: "$(E)"}
    - {name: G, valueFrom: {fieldRef: {fieldPath: "metadata.labels['none']"}}}
    - {name: H}
---
kind: Deployment
spec:
  replicas: 3
  template: {metadata: {labels: {a: b}}, spec: {containers: [{name: a}]}}
---
kind: Job
metadata: {name: j}
spec: {completions: 2, template: {spec: {containers: [{name: a}]}}}
---
kind: StatefulSet
metadata: {name: s}
spec:
  serviceName: x
  template:
    spec:
      containers:
      - name: a
        env:
        - name: LABEL
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
        - name: NO_ANNOTATION
          valueFrom: {fieldRef: {fieldPath: "metadata.annotations['apps.kubernetes.io/pod-index']"}}
---
kind: ConfigMap
---
kind: Job
metadata: {name: none}
spec: {completionMode: Indexed, template: {spec: {containers: [{name: a}]}}}
"""


def test_pods_of_other_kinds() -> None:
    alone, deployment, job, stateful = pods_of(yaml.safe_load_all(_OTHERS))
    assert (alone.owner, alone.name, alone.domain) == ("Pod/alone", "h", "d")
    (container,) = alone.containers
    assert container.ports == {1, 2}
    assert container.environment == {
        "A": "$(B)",  # B comes after it
        "B": "b",
        "C": "b$(D)",
        "E": None,
        "F": None,
        "G": "",
        "H": "",
    }
    assert (deployment.owner, deployment.name) == ("Deployment/(no name)", "")
    assert deployment.labels == {"a": "b"}
    assert (job.owner, job.name) == ("Job/j", "")
    assert (stateful.name, stateful.domain) == ("s-0", "x")
    assert stateful.labels == {"apps.kubernetes.io/pod-index": "0"}
    assert stateful.containers[0].environment == {"LABEL": "0", "NO_ANNOTATION": ""}
