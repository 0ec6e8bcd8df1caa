"""Private names of Keras's graphs of layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
from keras.src.models.functional import Functional

from stratagem.keras.private.access import as_open


class GraphCall(NamedTuple):
    """One call in the graph of a functional model; `args` and `kwargs` hold KerasTensors."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Any]

    @property
    def tensors(self) -> list[Any]:
        """The KerasTensors that the call takes, in the order of its arguments."""
        leaves: list[Any] = keras.tree.flatten((self.args, self.kwargs))
        return [one for one in leaves if isinstance(one, keras.KerasTensor)]


def graph_of(layer: keras.layers.Layer) -> Any:
    """Returns the functional model that computes a layer; None if it is computed by Python code."""
    if isinstance(layer, keras.Sequential):
        layer = as_open(layer)._functional
    return layer if isinstance(layer, Functional) else None


def graph_calls(graph: Any) -> list[GraphCall]:
    """Returns all calls in a graph, in the order of computation."""
    by_depth = as_open(graph)._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [
        GraphCall(node.operation, node.arguments.args, node.arguments.kwargs, [*node.outputs])
        for node in nodes
        if not node.is_input
    ]


def graph_output_ids(graph: Any) -> set[int]:
    """Returns the ids of the KerasTensors that a graph returns."""
    return set(map(id, graph.outputs))
