"""Loops of one's own over data from the host, beside the same loops by hand and TensorFlow's."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import Case, Environments, Place, Side, jax_side, tensorflow_side
from benchmarks.workloads import WORKLOADS

__all__ = ["make_cases"]

_WORKLOAD = "mlp"
_STEPS_A_CALL = 100


def make_cases(places: Sequence[Place], environments: Environments) -> list[Case]:
    """Returns a case for each place and way to call."""
    cases: list[Case] = []
    for place in places:
        cases += [
            _case("run", place, 1),
            _case("run_steps", place, _STEPS_A_CALL),
        ]
    return cases


def _case(name: str, place: Place, steps: int) -> Case:
    title = WORKLOADS[_WORKLOAD].title
    references: list[Side] = [
        jax_side("loop by hand", "jax_scan_loop", _WORKLOAD, place, steps),
    ]
    if place.platform == "cpu":  # TensorFlow of the peers has only the CPU
        references.append(
            tensorflow_side(
                "TF run in tf.function", "tensorflow_loop", _WORKLOAD, place, _STEPS_A_CALL
            )
        )
    return Case(
        name=f"{title}, {place}, {name}, {steps} a call",
        ours=jax_side(name, "stratagem_loop", _WORKLOAD, place, steps),
        references=tuple(references),
    )
