"""Policies of rematerialization: the intermediate results that a layer saves for its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from stratagem.messages import explain

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
