"""`fit` beside Keras on JAX without us, Keras on TensorFlow, and PyTorch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from benchmarks.cases import Case, Environments, Place, Side, jax_side, tensorflow_side
from benchmarks.workers.protocol import WorkerOptions
from benchmarks.workloads import WORKLOADS

__all__ = ["make_cases"]


def make_cases(places: Sequence[Place], environments: Environments) -> list[Case]:
    """Returns a case for each model and place, and one with a step a call for one device."""
    del environments
    cases: list[Case] = []
    for place in places:
        cases.append(_many_steps_case("mlp", place))
        if place.num_devices == 1:
            cases.append(_one_step_case("mlp", place))
        for workload in ("cnn", "transformer", "resnet50"):
            if workload != "resnet50" or place.platform == "gpu":
                cases.append(_many_steps_case(workload, place))
    return cases


def _many_steps_case(workload: str, place: Place) -> Case:
    steps = WORKLOADS[workload].steps_per_call(place.platform)
    references = [_keras(workload, place, steps)]
    if workload == "mlp":  # whose steps are short; a call of one step costs the others nothing
        references.insert(0, _keras(workload, place, 1))
    if place.platform == "cpu":  # TensorFlow and PyTorch of the peers have only the CPU
        references += [_tensorflow(workload, place, steps), _torch(workload, place)]
    return _case(workload, place, steps, references)


def _one_step_case(workload: str, place: Place) -> Case:
    case = _case(workload, place, 1, [_keras(workload, place, 1)])
    return dataclasses.replace(case, is_main=False)


def _case(workload: str, place: Place, steps: int, references: Sequence[Side]) -> Case:
    return Case(
        name=f"{WORKLOADS[workload].title}, {place}, {steps} a call",
        ours=jax_side("fit", "stratagem_fit", workload, place, steps),
        references=tuple(references),
    )


def _keras(workload: str, place: Place, steps: int) -> Side:
    """Keras itself on JAX.

    In our environment: with TensorFlow installed beside it, Keras imports it, for seconds.
    """
    name = "Keras DataParallel" if place.num_devices > 1 else "Keras on JAX"
    return jax_side(f"{name}, {steps} a call", "keras_fit", workload, place, steps)


def _tensorflow(workload: str, place: Place, steps: int) -> Side:
    several = place.num_devices > 1
    # Keras 3.15.1 with more fails under MirroredStrategy: "You must feed a value for placeholder".
    steps = 1 if several else steps
    name = "TF MirroredStrategy" if several else f"Keras on TensorFlow, {steps} a call"
    return tensorflow_side(name, "tensorflow_fit", workload, place, steps)


def _torch(workload: str, place: Place) -> Side:
    # Each rank gets its share of the cores: with more, threads of the ranks wait for one another.
    threads_per_rank = max(1, (os.cpu_count() or 1) // place.num_devices)
    return Side(
        name="PyTorch DDP" if place.num_devices > 1 else "PyTorch",
        module="benchmarks.workers.torch_ddp",
        options=_options(workload, place, 1),
        variables={"OMP_NUM_THREADS": str(threads_per_rank)},
        environment="peers",
    )


def _options(workload: str, place: Place, steps: int) -> WorkerOptions:
    return WorkerOptions(
        workload=workload,
        platform=place.platform,
        num_devices=place.num_devices,
        steps_per_call=steps,
    )
