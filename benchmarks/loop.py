"""Loops of one's own over data from the host, beside the same loops by hand and TensorFlow's."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import Case, Environments, Place, Side, jax_side, tensorflow_side
from benchmarks.workloads import WORKLOADS

__all__ = ["make_cases"]

_WORKLOADS = ("mlp", "small_mlp")
_STEPS_A_CALL = 100


def make_cases(places: Sequence[Place], environments: Environments) -> list[Case]:
    """Returns a case for each place, model and way to call."""
    return [
        _case(name, workload, place, steps)
        for place in places
        for workload in _WORKLOADS
        for name, steps in (("run", 1), ("run_steps", _STEPS_A_CALL))
    ]


def _case(name: str, workload: str, place: Place, steps: int) -> Case:
    title = WORKLOADS[workload].title
    references: list[Side] = [
        jax_side("loop by hand", "jax_scan_loop", workload, place, steps),
    ]
    if place.platform == "cpu":  # TensorFlow of the peers has only the CPU
        references.append(
            tensorflow_side(
                "TF run in tf.function", "tensorflow_loop", workload, place, _STEPS_A_CALL
            )
        )
    return Case(
        name=f"{title}, {place}, {name}, {steps} a call",
        ours=jax_side(name, "stratagem_loop", workload, place, steps),
        references=tuple(references),
        is_main=workload == "small_mlp" or steps == 1,
    )
