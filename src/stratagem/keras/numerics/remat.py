"""`sg.remat`: rematerialization of a model that is already built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import keras

from stratagem.errors import explain
from stratagem.keras.numerics.repeated_blocks import choose_layers
from stratagem.keras.private import remat_mode, set_remat_mode

# Policies of rematerialization: the intermediate results that a layer saves for its gradient.

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
    raise ValueError(
        explain(
            f"remat received policy={policy!r}.",
            expected=f"one of {', '.join(map(repr, POLICIES))}, a policy of "
            "jax.checkpoint_policies, or None.",
            fix='start with policy="full", which saves the most memory.',
        )
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
