"""`sg.scan_layers`: equal layers of a model that follow each other, computed by one `jax.lax.scan`.

A chain is found in the graph of a functional model: equal layers, each of which takes the output of
the one before. The first layer's call is the body of the loop. Its variables get the values of each
layer in turn, and what it writes, adds as a loss and the like is returned for each layer.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras
import numpy as np

from stratagem.errors import invalid
from stratagem.execution.summary.collector import Collector
from stratagem.execution.tracing.functionalize import CapturedWrites, ReplicaScope
from stratagem.keras.numerics.rematerialization import choose_layers, is_compiled, set_chain
from stratagem.keras.private import (
    GraphCall,
    flatten_layers,
    get_keras_mask,
    get_stateless_scope,
    graph_calls,
    graph_of,
    ids_of_losses,
    remat_mode,
    set_keras_mask,
    sublayers,
)
from stratagem.resources import changing


def scan_layers(
    model: keras.layers.Layer, *, layers: str | Sequence[keras.layers.Layer] | None = None
) -> list[keras.layers.Layer]:
    """Makes steps compute equal layers that follow each other by one `jax.lax.scan`.

    The program of a step then has one of these layers, and is traced and compiled faster. Only the
    updates of variables grow with their number. Variables stay as they are, with their names and
    values. Without `layers`, the repeated blocks of the model are taken, such as the decoder layers
    of a KerasHub backbone. Call it before the first step, with or without a strategy, before or
    after `sg.remat`. It is not saved with the model. Layers that are called on their own, as in
    KerasHub's `generate`, are computed on their own.

    Args:
        model: a functional or sequential Keras model, or one that has such a model inside.
        layers: the layers, or a regular expression that is searched in the names of all layers.

    Returns:
        The layers.

    Raises:
        ValueError: the model has no such layers, they are not equal, or they do not follow each
            other.
        TypeError: `model` or an element of `layers` is no layer.

    Example:
        >>> blocks = [keras.layers.MultiHeadAttention(2, 4) for _ in range(3)]
        >>> x = inputs = keras.Input((16, 8))
        >>> for block in blocks:
        ...     x = block(x, x)
        >>> model = keras.Model(inputs, x)
        >>> sg.scan_layers(model) == blocks
        True

    Source: MaxText's scan_layers.
    """
    chosen = choose_layers("scan_layers", model, layers, "scan")
    for chain in find_chains(model, chosen):
        chain.scan_in_calls()
        for layer in chain.layers:
            set_chain(layer, chain)
    return chosen


# Comparison of layers: equal ones compute the same function of their inputs and variables.

_PLAIN = bool | int | float | str | None
_STATE_OF_SEEDS = "seed"  # an initial value, which a variable holds


def find_difference(
    first: keras.layers.Layer, second: keras.layers.Layer, *, were_called: bool = False
) -> str | None:
    """Returns the respect in which two layers differ; None for equal ones.

    After a call, plain attributes are not compared: it may set some, and a scan calls one layer.
    """
    if type(first) is not type(second):
        return f"their classes, {type(first).__name__} and {type(second).__name__}"
    facts = [_facts(one, were_called=were_called) for one in (first, second)]
    found = _compared(*facts)
    if found is not None:
        return found
    inner = sublayers(first), sublayers(second)
    if len(inner[0]) != len(inner[1]):
        return f"the number of their layers, {len(inner[0])} and {len(inner[1])}"
    for one, other in zip(*inner, strict=True):
        difference = find_difference(one, other, were_called=were_called)
        if difference is not None:
            return f"{one.name!r} and {other.name!r}, in {difference}"
    return None


def _compared(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    for key in (*first, *(key for key in second if key not in first)):
        one, other = first.get(key), second.get(key)
        if not _are_same(one, other):
            return f"{key}: {one!r} and {other!r}"
    return None


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def _facts(layer: keras.layers.Layer, *, were_called: bool) -> dict[str, Any]:
    variables = [(tuple(one.shape), str(one.dtype), one.trainable) for one in layer.variables]
    return {
        "trainable": layer.trainable,
        "compute_dtype": layer.compute_dtype,
        **_config(layer),
        **({} if were_called else _attributes(layer)),
        "variables": variables,
    }


def _config(layer: keras.layers.Layer) -> dict[str, Any]:
    """Returns the configuration that a class returns itself.

    Keras's own one for custom classes has all arguments, also those that only choose names.
    """
    if type(layer).get_config is keras.layers.Layer.get_config or isinstance(layer, keras.Model):
        return {}
    try:
        return _without_names(layer.get_config())
    except (NotImplementedError, AttributeError):  # KerasHub's Llama reads names it has not set
        return {}


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            key: _without_names(value)
            for key, value in config.items()
            if key not in ("name", "build_config", _STATE_OF_SEEDS)
            and not str(key).endswith("_initializer")
        }
    return [_without_names(one) for one in config] if isinstance(config, list | tuple) else config


def _attributes(layer: keras.layers.Layer) -> dict[str, Any]:
    """Returns the plain values that a layer of this class has set."""
    return {
        name: value
        for name, value in vars(layer).items()
        if name not in _names_of_all_layers() and name != _STATE_OF_SEEDS and _is_plain(value)
    }


@functools.cache
def _names_of_all_layers() -> frozenset[str]:
    layers = (keras.layers.Layer(), keras.Model(), keras.Sequential())
    return frozenset(name for layer in layers for name in vars(layer))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN | np.ndarray)


class LayerChain:
    """Equal layers that a graph calls one after the other.

    `places` are the arguments that take the output of the layer before: positions, or names. Only
    calls by the graph count: a layer that is called on its own is computed on its own.
    """

    def __init__(self, graph: Any, layers: Sequence[Any], places: Sequence[int | str]) -> None:
        self.graph = graph
        self.layers = layers
        self._places = places
        self._calls = _Calls()

    def carried(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the output of the layer before, which is an argument."""
        place = self._places[0]
        return args[place] if isinstance(place, int) else kwargs[place]

    def with_carried(
        self, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments with another output of the layer before."""
        new_args = [value if place in self._places else one for place, one in enumerate(args)]
        new_kwargs = {key: value if key in self._places else one for key, one in kwargs.items()}
        return new_args, new_kwargs

    def called_by_graph(self) -> AbstractContextManager[None]:
        """Marks a call of the graph, in which the layers are called in order."""
        return changing(self._calls, num=0, scan=self._calls.scan)

    def call_of(
        self, layer: keras.layers.Layer, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Callable[..., Any]:
        """Returns what computes a layer: the first of a call of the graph computes all of them."""
        if (place := self._place_of(layer)) is None:
            return call
        if place == 0 and not is_compiled():
            self._calls.num = None
            return call
        if place == 0:
            self._calls.scan = _Scan(self, call, args, kwargs)
        return lambda *args, **kwargs: self._calls.scan.output_of(place, self.carried(args, kwargs))

    def _place_of(self, layer: keras.layers.Layer) -> int | None:
        """Returns the place of a layer that is called next; None if it is computed on its own."""
        num = self._calls.num
        if num is None or self.layers[num] is not layer:
            return None
        self._calls.num = num + 1 if num + 1 < len(self.layers) else None
        return num

    def scan_in_calls(self) -> None:
        """Makes calls of the graph known to the chain."""
        self.graph.call = _GraphCallOfChain(self.graph.call, self)


class _Calls(threading.local):
    num: int | None = None
    scan: Any = None


class _GraphCallOfChain:
    """The `call` of a graph with a chain."""

    def __init__(self, original: Callable[..., Any], chain: LayerChain) -> None:
        functools.update_wrapper(self, original)
        self._original, self._chain = original, chain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._chain.called_by_graph():
            return self._original(*args, **kwargs)


def find_chains(model: Any, layers: Sequence[Any]) -> list[LayerChain]:
    """Returns the chains that some layers form. Raises ValueError for a layer that is in none."""
    graphs = [graph for one in flatten_layers(model) if (graph := graph_of(one)) is not None]
    left = {id(layer): layer for layer in layers}
    chains: list[LayerChain] = []
    for graph in graphs:
        for run in _runs(graph, left):
            chains.append(_chain(graph, run))
            for call in run:
                del left[id(call.operation)]
    if left:
        raise _not_in_chain(next(iter(left.values())))
    return chains


def _runs(graph: Any, layers: Mapping[int, Any]) -> list[list[GraphCall]]:
    """Returns calls that follow each other, two or more, of layers that are called once."""
    calls = graph_calls(graph)
    counts = collections.Counter(id(call.operation) for call in calls)
    uses = collections.Counter(key for call in calls for key in set(map(id, call.tensors)))
    returned = set(map(id, graph.outputs))
    chosen = [
        call
        for call in calls
        if id(call.operation) in layers
        and counts[id(call.operation)] == 1
        and len(call.outputs) == 1
    ]
    takers = {id(tensor): call for call in chosen for tensor in call.tensors}
    following: dict[int, GraphCall] = {}
    for call in chosen:
        output = id(call.outputs[0])
        if uses[output] == 1 and output not in returned and output in takers:
            following[id(call.operation)] = takers[output]
    followers = {id(call.operation) for call in following.values()}
    runs: list[list[GraphCall]] = []
    for call in chosen:
        if id(call.operation) in followers:
            continue
        run = [call]
        while (one := following.get(id(run[-1].operation))) is not None:
            run.append(one)
        if len(run) > 1:
            runs.append(run)
    return runs


def _chain(graph: Any, run: Sequence[GraphCall]) -> LayerChain:
    first, first_output = run[0].operation, run[0].outputs[0]
    places = _places(run[0], run[1])
    for before, call in itertools.pairwise(run):
        difference = find_difference(first, call.operation)
        if difference is None and (not places or _places(before, call) != places):
            difference = "the arguments that take the output of the layer before"
        if difference is None and _others(call, places) != _others(run[0], places):
            difference = "their other arguments"
        if difference is None and call.outputs[0].shape != first_output.shape:
            difference = "the shapes of their outputs"
        if difference is not None:
            raise invalid(
                f"scan_layers received {first.name!r} and {call.operation.name!r}, which "
                f"differ in {difference}.",
                expected="equal layers: they share one program, in which only the values of "
                "their variables differ.",
                fix="choose equal ones with layers=, or make the layers equal.",
            )
    return LayerChain(graph, [call.operation for call in run], places)


def _arguments(call: GraphCall) -> dict[int | str, Any]:
    return dict([*enumerate(call.args), *call.kwargs.items()])


def _places(before: GraphCall, call: GraphCall) -> list[int | str]:
    """Returns the arguments that are the output of the call before."""
    return [place for place, one in _arguments(call).items() if one is before.outputs[0]]


def _others(call: GraphCall, places: Sequence[int | str]) -> list[Any]:
    others = {key: value for key, value in _arguments(call).items() if key not in places}
    flat: list[Any] = keras.tree.flatten([*others.values()])
    return [[*others], [_comparable(one) for one in flat]]


def _comparable(leaf: Any) -> Any:
    plain = isinstance(leaf, bool | int | float | str | None)
    return leaf if plain else id(leaf)


def _not_in_chain(layer: Any) -> ValueError:
    return invalid(
        f"scan_layers received {layer.name!r}, which is in no row of layers.",
        expected="two or more layers of a functional or sequential model, each called once "
        "there with the output of the one before, which goes nowhere else.",
        fix="choose such layers with layers=; write a model whose `call` loops over its layers "
        "as a functional model.",
    )


# The loop.


class _Scan:
    """One call of a chain."""

    def __init__(self, chain: LayerChain, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._chain, self._call, self._args, self._kwargs = chain, call, args, kwargs
        self._first = chain.layers[0]
        self._mask = get_keras_mask(chain.carried(args, kwargs))
        self._columns: list[Any] = [*zip(*(one.variables for one in chain.layers), strict=True)]
        self._outer: Any = get_stateless_scope()
        self._scope = ReplicaScope(self._outer_value)
        self._captured: Any = None
        self._losses: Sequence[Any] = ()
        self._owners: list[list[bool]] | None = None

    def output_of(self, place: int, carried: Any) -> Any:
        """Returns the output of all layers; the first one computes them.

        Each layer records its losses itself: Keras clears them when it is called.
        """
        output = carried if place else self._computed()
        self._record_losses(place)
        return output

    def _computed(self) -> Any:
        self._check_modes()
        stacks = [_stacked([*map(self._value, column)]) for column in self._columns]
        carried = self._chain.carried(self._args, self._kwargs)
        num_layers = len(self._chain.layers)
        output, results = jax.lax.scan(self._body, carried, stacks, length=num_layers)
        self._record_writes(results["writes"])
        self._losses = results["losses"]
        return output

    def _outer_value(self, variable: Any) -> Any:
        return None if self._outer is None else self._outer.get_current_value(variable)

    def _value(self, variable: Any) -> Any:
        value = self._outer_value(variable)
        return variable.value if value is None else value

    def _body(self, carried: Any, values: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        given = carried
        if self._mask is not None:
            set_keras_mask(carried, self._mask)
        args, kwargs = self._chain.with_carried(carried, self._args, self._kwargs)
        summaries = Collector()
        self._scope = ReplicaScope(self._outer_value)
        with self._scope as scope, summaries:
            for column, value in zip(self._columns, values, strict=True):
                scope.set_value(column[0], value)
            output = self._call(*args, **kwargs)
        self._check_output(given, output)
        if summaries.summaries:
            raise self._refusal("a layer that writes summaries", "write them outside of the layers")
        self._captured, writes = scope.captured()
        for variable, _ in self._captured.written:
            if id(variable) not in self._column_of():
                raise self._refusal(
                    f"a layer that assigns to {variable.path!r}, which is not its own",
                    "assign outside of the layers, or give each layer a variable",
                )
        return output, {"writes": writes, "losses": scope.losses}

    def _check_modes(self) -> None:
        modes = [remat_mode(one)._replace(chain=None) for one in self._chain.layers]
        if any(one != modes[0] for one in modes):
            raise self._refusal(
                "layers of which only some are rematerialized, or by different policies",
                "rematerialize all of them, or none",
            )
        for one in self._chain.layers[1:]:
            difference = find_difference(self._first, one, were_called=True)
            if difference is not None:
                raise self._refusal(
                    f"layers that were changed afterwards: {one.name!r} differs from the first one "
                    f"in {difference}",
                    "change all of them alike, or freeze layers before and scan the others",
                )
        if self._first.activity_regularizer is not None:
            raise self._refusal(
                "layers with an activity regularizer", "give it to layers inside of them"
            )

    def _check_output(self, given: Any, output: Any) -> None:
        types = [(one.shape, str(one.dtype)) for one in (given, output)]
        if types[0] != types[1]:
            raise self._refusal(
                f"a layer that gets {types[0]} and returns {types[1]}",
                "scan layers whose output has the shape and the dtype of their input",
            )
        if not self._keeps_mask(given, output):
            raise self._refusal(
                "a layer whose output has another mask than its input",
                "compute the mask outside of the layers",
            )

    def _keeps_mask(self, given: Any, output: Any) -> bool:
        made = get_keras_mask(output)
        if self._mask is None or made is not None:
            return made is None or self._mask is not None
        is_same = self._first.compute_mask(given, self._mask) is self._mask
        return self._first.supports_masking and is_same

    def _refusal(self, received: str, fix: str) -> ValueError:
        return invalid(
            f"scan_layers received {received}: {self._first.name!r}.",
            expected="layers of which one loop can compute all.",
            fix=f"{fix}; or choose other layers with layers=.",
        )

    def _column_of(self) -> dict[int, Any]:
        """Returns the variable of each layer, by the id of what is written in the first one."""
        return {id(self._scope.held(column[0])): column for column in self._columns}

    def _record_writes(self, stacks: Sequence[Any]) -> None:
        """Writes to the variables of all layers what the first one writes to its own."""
        columns = self._column_of()
        every: list[tuple[Any, bool]] = []
        counts = Counter[int]()
        for own, is_unproven in self._captured.written:
            column = columns[id(own)]
            if len(set(map(id, column))) < len(column):
                raise self._refusal(
                    f"layers that share {own.path!r} and assign to it",
                    "give each layer a variable of its own",
                )
            every += [(variable, is_unproven) for variable in column]
            count = self._captured.num_writes[id(own)]
            counts.update({id(self._scope.held(variable)): count for variable in column})
        values = [value for stack in stacks[: len(self._captured.written)] for value in stack]
        CapturedWrites(every, counts).replay(values, self._outer)

    def _record_losses(self, place: int) -> None:
        if not self._losses or self._outer is None or not self._outer.collect_losses:
            return
        first, layers = (flatten_layers(self._chain.layers[i]) for i in (0, place))
        if self._owners is None:
            inner = map(id, self._scope.losses)
            self._owners = [[key in ids_of_losses(one) for one in first] for key in inner]
        for owners, stack in zip(self._owners, self._losses, strict=True):
            loss = stack[place]
            self._outer.add_loss(loss)
            for layer, is_owner in zip(layers, owners, strict=True):
                if is_owner:
                    ids_of_losses(layer).add(id(loss))


def _stacked(values: Sequence[Any]) -> Any:
    return jax.lax.concatenate([jax.lax.expand_dims(one, (0,)) for one in values], 0)
