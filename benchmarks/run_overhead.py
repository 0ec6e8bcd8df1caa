"""`strategy.run` beside the same step written by hand with `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import Case, Environments, Place, jax_side
from benchmarks.workloads import WORKLOADS

__all__ = ["make_cases"]

_WORKLOADS = ("mlp", "cnn", "transformer")


def make_cases(places: Sequence[Place], environments: Environments) -> list[Case]:
    """Returns a case for each model and place; all sides run in our own environment."""
    return [
        Case(
            name=f"{WORKLOADS[workload].title}, {place}",
            ours=jax_side("strategy.run", "stratagem_run", workload, place),
            references=(jax_side("JAX by hand", "jax_step_loop", workload, place),),
        )
        for workload in _WORKLOADS
        for place in places
    ]
