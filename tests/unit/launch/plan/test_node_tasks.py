"""Numbers of nodes, and the node of each task: tables."""

from __future__ import annotations

import pytest

from stratagem.launch.plan.options import node_range, tasks_of_nodes


@pytest.mark.parametrize(
    ("nnodes", "expected"),
    [(1, (1, 1)), ("4", (4, 4)), ("2:4", (2, 4)), (" 1:1 ", (1, 1))],
)
def test_number_or_range(nnodes, expected) -> None:
    assert node_range(nnodes) == expected


@pytest.mark.parametrize("nnodes", [0, -1, "00", "0:2", "3:2", "", ":", "1:", ":2", "1:2:3", "two"])
def test_other_numbers_are_refused(nnodes) -> None:
    with pytest.raises(ValueError, match=r"is not a number of nodes(?s:.)*MIN:MAX(?s:.)*--nnodes"):
        node_range(nnodes)


def test_workers_are_numbered_node_by_node_and_servers_in_turn() -> None:
    tasks = tasks_of_nodes([2, 0, 1], chief=True, ps=4, evaluator=True)
    assert tasks == [
        ("chief", 0, 0),
        ("worker", 0, 0),
        ("worker", 1, 0),
        ("worker", 2, 2),
        ("ps", 0, 0),
        ("ps", 1, 1),
        ("ps", 2, 2),
        ("ps", 3, 0),
        ("evaluator", 0, 0),
    ]
