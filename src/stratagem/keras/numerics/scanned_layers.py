"""Layers of a chain computed by one `jax.lax.scan` over their stacked variables.

The first layer's call is the body. Its variables get the values of each layer in turn, and what it
writes, adds as a loss and the like is returned for each layer.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from stratagem.errors import explain
from stratagem.execution.summary.collector import Collector
from stratagem.execution.tracing.functionalize import CapturedWrites, ReplicaScope
from stratagem.keras.numerics.layer_chains import LayerChain
from stratagem.keras.numerics.rematerialization import is_compiled
from stratagem.keras.private import get_keras_mask, get_stateless_scope, set_keras_mask
from stratagem.keras.private.rematerialization import LayerRemat, ids_of_losses, remat_mode
from stratagem.keras.private.variables import flatten_layers


def scanned_layer(original: Callable[..., Any]) -> Any:
    """Returns `Layer.rematerialized_call` that computes all layers of a chain at the first one."""

    @functools.wraps(original)
    def rematerialized_call(
        self: keras.layers.Layer, layer_call: Callable[..., Any], *args: object, **kwargs: object
    ) -> Any:
        mode = remat_mode(self)
        call = original(self, layer_call, *args, **kwargs)
        chain: Any = mode.chain if isinstance(mode, LayerRemat) else None
        if chain is None or (place := chain.place_of(self)) is None:
            return call
        if place == 0 and not is_compiled():
            chain.leave()
            return call
        if place == 0:
            chain.begin(_Scan(chain, call, args, kwargs))
        return lambda *args, **kwargs: chain.scan.output_of(place, chain.carried(args, kwargs))

    return rematerialized_call


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
        return ValueError(
            explain(
                f"scan_layers received {received}: {self._first.name!r}.",
                expected="layers of which one loop can compute all.",
                fix=f"{fix}; or choose other layers with layers=.",
            )
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
