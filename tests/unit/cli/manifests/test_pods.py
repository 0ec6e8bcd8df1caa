"""Pods that documents create, with their environments."""

from __future__ import annotations

import string

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stratagem.cli.manifests.kubernetes import expand, pods_of, render_kubernetes
from tests.unit.cli.manifests.kubelet import documents, expanded, started_pods


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
