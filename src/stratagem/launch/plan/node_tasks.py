"""Numbers of nodes, and the node of each task."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stratagem.messages import explain

_RANGE = re.compile(r"(\d+)(?::(\d+))?")


def node_range(nnodes: int | str) -> tuple[int, int]:
    """Returns the least and the largest number of nodes. Raises ValueError if it is malformed.

    Example:
        >>> node_range("2:4"), node_range(3)
        ((2, 4), (3, 3))
    """
    match = _RANGE.fullmatch(str(nnodes).strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(
            explain(
                f"nnodes={nnodes!r} is not a number of nodes.",
                expected="N, or MIN:MAX with 1 <= MIN <= MAX.",
                fix="write --nnodes 4, or --nnodes 2:4 to continue with two nodes.",
            )
        )
    return least, most


def tasks_of_nodes(
    workers: list[int],
    *,
    chief: bool,
    ps: int,
    evaluator: bool,
    input_workers: Sequence[int] = (),
) -> list[tuple[str, int, int]]:
    """Returns type, index and node of each task, the leader first.

    `workers` and `input_workers` have the numbers of each node. Servers are distributed over the
    nodes in turn; chief and evaluator run on node 0. The input workers of a node are one task.

    Example:
        >>> tasks_of_nodes([1, 2], chief=False, ps=1, evaluator=False)
        [('worker', 0, 0), ('worker', 1, 1), ('worker', 2, 1), ('ps', 0, 0)]
    """
    nodes_of_workers = [node for node, count in enumerate(workers) for _ in range(count)]
    nodes_of_inputs = [node for node, count in enumerate(input_workers) if count]
    return [
        *([("chief", 0, 0)] if chief else []),
        *(("worker", index, node) for index, node in enumerate(nodes_of_workers)),
        *(("ps", index, index % len(workers)) for index in range(ps)),
        *([("evaluator", 0, 0)] if evaluator else []),
        *(("input", index, node) for index, node in enumerate(nodes_of_inputs)),
    ]
