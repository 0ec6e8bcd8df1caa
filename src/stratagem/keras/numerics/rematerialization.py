"""Rematerialization: calls whose activations are computed again in the backward pass.

Keras passes a layer's call to `jax.checkpoint`, which turns `training=True` into an array and loses
what the layer writes. Here arguments are closed over, and writes, losses and summaries are results.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from stratagem.execution.summary.collector import Collector
from stratagem.execution.summary.kinds import forward_summaries
from stratagem.execution.tracing.functionalize import ReplicaScope
from stratagem.keras.numerics.remat import LAYER_INPUT, RematPolicy
from stratagem.keras.private import (
    get_keras_mask,
    get_stateless_scope,
    in_symbolic_scope,
    set_keras_mask,
)
from stratagem.keras.private.rematerialization import LayerRemat, ids_of_losses, remat_mode
from stratagem.keras.private.variables import flatten_layers


class _Current(threading.local):
    is_recomputed = False


_current = _Current()


def rematerialized_function(original: Callable[..., Any]) -> Any:
    """Returns `keras.remat` that takes any arguments and keeps writes to variables."""

    @functools.wraps(original)
    def remat(f: Callable[..., Any]) -> Callable[..., Any]:
        return _recomputed(f, RematPolicy())

    return remat


def rematerialized_layer(original: Callable[..., Any]) -> Any:
    """Returns `Layer.rematerialized_call` that recomputes whole layers, and each once."""

    @functools.wraps(original)
    def rematerialized_call(
        self: keras.layers.Layer, layer_call: Callable[..., Any], *args: object, **kwargs: object
    ) -> Any:
        mode = remat_mode(self)
        if isinstance(mode, LayerRemat) and mode.policy is not None:  # of sg.remat
            return _recomputed(layer_call, mode.policy)
        if mode is not None and mode.mode in ("full", "larger_than"):
            return _recomputed_in_scope(self, mode, layer_call, args, kwargs)
        has_mode = mode is not None and mode.mode is not None
        return original(self, layer_call, *args, **kwargs) if has_mode else layer_call

    return rematerialized_call


def _recomputed_in_scope(
    layer: keras.layers.Layer, mode: Any, call: Callable[..., Any], args: Any, kwargs: Any
) -> Callable[..., Any]:
    """Returns a layer's call as a `keras.RematScope` says."""
    if _is_exempt(layer):
        return call
    recomputed = _recomputed(call, RematPolicy())
    if mode.mode == "full":
        return recomputed
    if in_symbolic_scope():
        return call
    is_large = _output_size(call, args, kwargs) > mode.output_size_threshold
    return recomputed if is_large else call


def _is_exempt(layer: keras.layers.Layer) -> bool:
    """Returns True for a layer that a scope leaves as it is.

    A model recomputed as a whole would need the memory of all its layers at once. The gradient of a
    lookup needs only the ids.
    """
    is_whole = isinstance(layer, keras.Model | keras.layers.Embedding)
    return is_whole or _current.is_recomputed


def _output_size(call: Callable[..., Any], args: Any, kwargs: Any) -> int:
    """Returns the number of elements of a call's results, without computing them."""
    one = _Call(call, RematPolicy())
    shapes = jax.eval_shape(functools.partial(one.compute, args, kwargs))
    return sum(math.prod(shape.shape) for shape in shapes["outputs"])


def is_compiled() -> bool:
    """Returns True in a function that is traced to be compiled."""
    return not in_symbolic_scope() and isinstance(jnp.zeros(()), Tracer)


def _recomputed(fn: Callable[..., Any], policy: RematPolicy) -> Callable[..., Any]:
    """Returns a function that is computed again in the backward pass of a compiled step."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Op by op, and while Keras infers shapes, there is no backward pass to save memory in.
        return _Call(fn, policy).run(args, kwargs) if is_compiled() else fn(*args, **kwargs)

    return call


class _Call:
    """One traced call, whose side effects are results of the recomputed function."""

    def __init__(self, fn: Callable[..., Any], policy: RematPolicy) -> None:
        self._fn = fn
        self._policy = policy
        self._outer: Any = get_stateless_scope()
        read = (lambda _: None) if self._outer is None else self._outer.get_current_value
        self._scope = ReplicaScope(read)
        self._summaries = Collector()
        self._leaves: list[Any] = []
        self._structure: Any = None
        self._captured: Any = None

    def run(self, args: Any, kwargs: Any) -> Any:
        """Calls the function, and repeats its side effects outside."""
        compute = functools.partial(self.compute, args, kwargs)
        results: Any = jax.checkpoint(compute, policy=self._policy.of_jax)()
        self._captured.replay(results["writes"], self._outer)
        self._record_losses(results["losses"])
        forward_summaries(self._summaries.summaries, results["summaries"])
        arrays = iter(zip(results["outputs"], results["masks"], strict=True))
        leaves = [_masked(*next(arrays)) if _is_array(one) else one for one in self._leaves]
        return keras.tree.pack_sequence_as(self._structure, leaves)

    def compute(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Calls the function; returns its arrays, and what it changes."""
        if self._policy.names_input:
            named: Any = keras.tree.map_structure(_named, (args, kwargs))
            args, kwargs = named
        previous, _current.is_recomputed = _current.is_recomputed, True
        try:
            with self._scope as scope, self._summaries:
                outputs = self._fn(*args, **kwargs)
        finally:
            _current.is_recomputed = previous
        self._structure, self._leaves = outputs, keras.tree.flatten(outputs)
        self._captured, writes = scope.captured()
        arrays = [leaf for leaf in self._leaves if _is_array(leaf)]
        return {
            "outputs": arrays,
            "masks": [get_keras_mask(leaf) for leaf in arrays],
            "writes": writes,
            "losses": scope.losses,
            "summaries": self._summaries.values,
        }

    def _record_losses(self, losses: Sequence[Any]) -> None:
        if not losses or self._outer is None or not self._outer.collect_losses:
            return
        owner = getattr(self._fn, "__self__", None)
        layers = flatten_layers(owner) if isinstance(owner, keras.layers.Layer) else []
        ids = [ids_of_losses(layer) for layer in layers]
        for inner, loss in zip(self._scope.losses, losses, strict=True):
            self._outer.add_loss(loss)
            for of_layer in ids:
                if id(inner) in of_layer:
                    of_layer.add(id(loss))


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array)


def _named(leaf: Any) -> Any:
    """Names an activation, so that a policy can move it."""
    is_activation = _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return (
        _masked(checkpoint_name(leaf, LAYER_INPUT), get_keras_mask(leaf)) if is_activation else leaf
    )


def _masked(array: Any, mask: Any) -> Any:
    if mask is not None:
        set_keras_mask(array, mask)
    return array
