"""Slurm's compact lists of hosts and tasks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.cluster.slurm_expressions import expand_hostlist, expand_tasks_per_node

# TF 2.21 slurm_cluster_resolver.expand_hostlist.
HOSTLISTS = [
    ("n1", ["n1"]),
    ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
    ("n[08-11]", ["n08", "n09", "n10", "n11"]),
    ("node[001-003,7],gpu-a", ["node001", "node002", "node003", "node7", "gpu-a"]),
    ("a,b,a", ["a", "b", "a"]),
    ("[1-3]", ["1", "2", "3"]),
    ("", []),
]
# TF 2.21 slurm_cluster_resolver.expand_tasks_per_node.
TASKS = [
    ("3(x2),2,1", [3, 3, 2, 1]),
    ("1", [1]),
    ("2(x3)", [2, 2, 2]),
    ("4(x1),4", [4, 4]),
]


@pytest.mark.parametrize(("text", "hosts"), HOSTLISTS)
def test_host_list_is_expanded_as_in_tensorflow(text, hosts) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("n[1-2]-ib,m1", ["n1-ib", "n2-ib", "m1"]),
    ],
)
def test_ranges_may_stand_anywhere_in_a_name(text, hosts) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text", ["n[1-3", "n]1", "n[a-b]", "a,,b", "n[3-1]", "n[1-2-3]", "n[]", ",n1", "n1,", "n[[1]]"]
)
def test_bad_host_list_is_refused(text) -> None:
    with pytest.raises(ValueError, match=r"Invalid hostlist format(?s:.)*scontrol show hostnames"):
        expand_hostlist(text)


@settings(deadline=None, max_examples=50)
@given(first=st.integers(0, 200), length=st.integers(1, 50), digits=st.integers(1, 4))
def test_range_names_each_number_once(first, length, digits) -> None:
    last = first + length - 1
    hosts = expand_hostlist(f"n[{first:0{digits}}-{last:0{digits}}]")
    assert [int(host[1:]) for host in hosts] == list(range(first, last + 1))
    assert all(len(host) > digits for host in hosts)


@pytest.mark.parametrize(("text", "numbers"), TASKS)
def test_tasks_per_node_are_expanded_as_in_tensorflow(text, numbers) -> None:
    assert expand_tasks_per_node(text) == numbers


@pytest.mark.parametrize("text", ["", "x2", "2(3)", "2,", "2(x)", "2 (x3)"])
def test_bad_tasks_per_node_are_refused(text) -> None:
    with pytest.raises(ValueError, match="Invalid tasks-per-node list format"):
        expand_tasks_per_node(text)
