"""Rematerialization: calls whose activations are computed again in the backward pass.

`sg.remat` chooses layers of a finished model and a policy, `keras.RematScope` those that are made
in it. Keras passes a layer's call to `jax.checkpoint`, which turns `training=True` into an array
and loses what the layer writes. Here arguments are closed over, and writes, losses and summaries
are results.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from stratagem.errors import explain, invalid
from stratagem.execution.summary.collector import Collector
from stratagem.execution.summary.kinds import forward_summaries
from stratagem.execution.tracing.functionalize import ReplicaScope
from stratagem.keras.numerics.step_mode import in_step, step_state
from stratagem.keras.patches import patches
from stratagem.keras.private import (
    flatten_layers,
    get_keras_mask,
    get_stateless_scope,
    ids_of_losses,
    in_symbolic_scope,
    jax_core,
    remat_mode,
    set_keras_mask,
    set_remat_mode,
    sublayers,
)

# Policies: the intermediate results that a layer saves for its gradient.

LAYER_INPUT = "layer_input"  # the name of activations that enter a layer

_policies = jax.checkpoint_policies


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """The argument `policy` of `jax.checkpoint`; None computes everything again."""

    of_jax: Callable[..., Any] | None = None
    names_input: bool = False  # gives activations that enter a layer the name LAYER_INPUT


POLICIES: dict[str, RematPolicy] = {
    "full": RematPolicy(),
    "dots": RematPolicy(_policies.dots_with_no_batch_dims_saveable),
    "offload": RematPolicy(
        _policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        names_input=True,
    ),
    "offload_dots": RematPolicy(_policies.offload_dot_with_no_batch_dims("device", "pinned_host")),
}


def parse_policy(policy: object) -> RematPolicy | None:
    """Returns a policy by name, or one of JAX; None turns rematerialization off."""
    if policy is None:
        return None
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]
    if callable(policy):
        return RematPolicy(policy)
    raise invalid(
        f"remat received policy={policy!r}.",
        expected=f"one of {', '.join(map(repr, POLICIES))}, a policy of "
        "jax.checkpoint_policies, or None.",
        fix='start with policy="full", which saves the most memory.',
    )


class LayerRemat(NamedTuple):
    """The way to compute a finished layer: the fields of Keras's own modes, a policy, and a chain.

    With a policy, the whole layer is rematerialized; otherwise the mode of its `keras.RematScope`
    holds. `chain` is the scan that the layer belongs to.
    """

    policy: Any = None
    chain: Any = None
    mode: str | None = None
    output_size_threshold: int = 0
    layer_names: tuple[str, ...] = ()


def set_remat_policy(layer: keras.layers.Layer, policy: Any) -> None:
    """Rematerializes a layer by a policy; None turns all rematerialization of it off."""
    chain = getattr(remat_mode(layer), "chain", None)
    is_plain = policy is None and chain is None
    set_remat_mode(layer, None if is_plain else LayerRemat(policy, chain))


def set_chain(layer: keras.layers.Layer, chain: Any) -> None:
    """Makes a layer a part of a scan, and leaves its rematerialization as it is."""
    mode = remat_mode(layer)
    if mode is None:
        mode = LayerRemat()
    elif not isinstance(mode, LayerRemat):
        fields = (mode.mode, mode.output_size_threshold, tuple(mode.layer_names or ()))
        mode = LayerRemat(None, None, *fields)
    set_remat_mode(layer, mode._replace(chain=chain))


def remat(
    model: keras.layers.Layer,
    policy: str | Callable[..., Any] | None = "full",
    *,
    layers: str | Sequence[keras.layers.Layer] | None = None,
) -> list[keras.layers.Layer]:
    """Makes layers of a finished model recompute their activations in the backward pass.

    Activation memory then grows with the inputs of these layers, not with all results inside them;
    a step computes them once more. Without `layers`, the repeated blocks of the model are taken,
    such as the decoder layers of a KerasHub backbone. Call it before the first step, with or
    without a strategy. It is not saved with the model. `keras.RematScope` does the same for
    models whose layers you create yourself.

    Args:
        model: a Keras model or layer.
        policy: "full" saves the inputs of each layer only. "dots" also saves products with
            weights. "offload" and "offload_dots" keep what these two save in pinned host memory.
            A policy of `jax.checkpoint_policies` is taken, too. None turns rematerialization off.
        layers: the layers, or a regular expression that is searched in the names of all layers.

    Returns:
        The layers.

    Raises:
        ValueError: an unknown policy, or the model has no such layers.
        TypeError: `model` or an element of `layers` is no layer.

    Example:
        >>> blocks = [keras.layers.MultiHeadAttention(2, 4) for _ in range(3)]
        >>> x = inputs = keras.Input((16, 8))
        >>> for block in blocks:
        ...     x = block(x, x)
        >>> model = keras.Model(inputs, x)
        >>> sg.remat(model) == blocks
        True

    Source: keras.RematScope; jax.checkpoint_policies.
    """
    parsed = parse_policy(policy)
    chosen = choose_layers("remat", model, layers, "recompute")
    for layer in chosen:
        set_remat_policy(layer, parsed)
    return chosen


# Choice of a model's layers: its repeated blocks, or those that an argument names.


def choose_layers(caller: str, model: Any, layers: Any, purpose: str) -> list[Any]:
    """Returns the repeated blocks of a model, or the given layers; `caller` is named in errors."""
    given = [model] if layers is None or isinstance(layers, str) else [model, *layers]
    wrong = [one for one in given if not isinstance(one, keras.layers.Layer)]
    if wrong:
        raise TypeError(
            explain(
                f"{caller} received {wrong[0]!r}.",
                expected="a Keras model or layer.",
                fix="pass the model, and layers=[...] to choose some of its layers.",
            )
        )
    if layers is None:
        chosen = _blocks(model)
    elif isinstance(layers, str):
        chosen = [one for one in flatten_layers(model) if re.search(layers, one.name)]
    else:
        inside = set(map(id, flatten_layers(model)))
        chosen = [one for one in layers if id(one) in inside]
        if len(chosen) < len(layers):
            raise _not_found(caller, model, "a layer that is not in the model", purpose)
    if not chosen:
        wanted = "no layers" if layers is None else f"layers={layers!r}"
        raise _not_found(caller, model, wanted, purpose)
    return chosen


def _not_found(caller: str, model: Any, received: str, purpose: str) -> ValueError:
    names = [layer.name for layer in flatten_layers(model)][1:9]
    return invalid(
        f"{caller} received {received}, and found nothing to {purpose} in {model.name!r}.",
        expected="two or more blocks of one class, each made of layers; or layers of the "
        f"model, such as {', '.join(names)}.",
        fix="pass layers=: layers of the model, or a regular expression for their names.",
    )


def _blocks(layer: keras.layers.Layer) -> list[Any]:
    """Returns the outermost repeated layers that are made of layers with weights."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for one in sublayers(layer):
        groups[_kind(one)].append(one)
    found: list[Any] = []
    for group in groups.values():
        inside = [block for one in group for block in _blocks(one)]
        if isinstance(group[0], keras.Model) and inside:
            found += inside
        elif len(group) > 1 and any(one.weights for one in sublayers(group[0])):
            found += group
        else:
            found += inside
    return found


def _kind(layer: keras.layers.Layer) -> Any:
    """Returns the class of a layer, and for a model also the shapes of its weights."""
    if not isinstance(layer, keras.Model):
        return type(layer)
    return type(layer), tuple(tuple(weight.shape) for weight in layer.weights)


# Recomputed calls.


@patches(
    jax_core,
    "remat",
    why="arguments such as training=True stay Python values, and writes are kept",
)
def rematerialized_function(original: Callable[..., Any]) -> Any:
    """Returns `keras.remat` that takes any arguments and keeps writes to variables."""

    @functools.wraps(original)
    def remat(f: Callable[..., Any]) -> Callable[..., Any]:
        return _recomputed(f, RematPolicy())

    return remat


@patches(
    keras.layers.Layer,
    "rematerialized_call",
    why="a layer is recomputed once, not once more for each layer around it; the first layer of a "
    "scan computes all of them",
)
def rematerialized_layer(original: Callable[..., Any]) -> Any:
    """Returns `Layer.rematerialized_call` that recomputes whole layers, and each once."""

    @functools.wraps(original)
    def rematerialized_call(
        self: keras.layers.Layer, layer_call: Callable[..., Any], *args: object, **kwargs: object
    ) -> Any:
        mode, call = remat_mode(self), layer_call
        if isinstance(mode, LayerRemat) and mode.policy is not None:  # of sg.remat
            call = _recomputed(layer_call, mode.policy)
        elif mode is not None and mode.mode in ("full", "larger_than"):
            call = _recomputed_in_scope(self, mode, layer_call, args, kwargs)
        elif mode is not None and mode.mode is not None:
            call = original(self, layer_call, *args, **kwargs)
        chain: Any = mode.chain if isinstance(mode, LayerRemat) else None
        return call if chain is None else chain.call_of(self, call, args, kwargs)

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
    return is_whole or step_state().is_recomputed


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
        with in_step(is_recomputed=True), self._scope as scope, self._summaries:
            outputs = self._fn(*args, **kwargs)
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
