"""Training beside the same by hand and by other frameworks: the cases of six benchmarks.

`run_overhead`  `strategy.run` beside the same step written by hand with `jax.shard_map`.
`fit_overhead`  `fit` beside a `lax.scan` by hand that keeps the same metrics.
`fit_peers`     `fit` beside Keras on JAX and its nightly build, Keras on TensorFlow, and PyTorch.
`loop`          loops of one's own over data from the host, by hand, and TensorFlow's.
`input`         loops fed from the host, beside the step alone, the input alone, and by hand.
`scaling`       two workers beside one, each on a core of its own and with as large a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.images import decoding_s
from benchmarks.report import make_row, paired_ratios
from benchmarks.runner import Run
from benchmarks.sides import Case, Place, Side, jax_side, tensorflow_side, worker_side
from benchmarks.workers.protocol import cluster_variables, rank_variables
from benchmarks.workloads import WORKLOADS

_STEPS_OF_A_LOOP = 100
# What an efficiency of two workers should at least be, beside two workers apart.
_WANTED = {"mlp": 0.7, "cnn": 0.95, "transformer": 0.95}


def _title(workload: str, *more: object) -> str:
    return ", ".join(map(str, (WORKLOADS[workload].title, *more)))


def run_overhead_cases(places: Sequence[Place]) -> list[Case]:
    return [
        Case(
            name=_title(workload, place),
            ours=jax_side("strategy.run", "stratagem_run", workload, place),
            references=(jax_side("JAX by hand", "jax_by_hand", workload, place, kind="step"),),
        )
        for workload in ("mlp", "cnn", "transformer")
        for place in places
    ]


def fit_overhead_cases(places: Sequence[Place]) -> list[Case]:
    called = [
        *((name, WORKLOADS[name].steps_per_call) for name in ("mlp", "cnn", "transformer")),
        ("mlp", 1),
    ]
    return [
        Case(
            name=_title(workload, place, f"{steps} a call"),
            ours=_fit(workload, place, steps),
            references=(_scan("scan by hand", workload, place, steps),),
        )
        for place in places
        for workload, steps in called
    ]


def fit_peers_cases(places: Sequence[Place]) -> list[Case]:
    cases: list[Case] = []
    for place in places:
        for workload in ("mlp", "cnn", "transformer"):
            steps = WORKLOADS[workload].steps_per_call
            references = [_keras(workload, place, steps), _keras(workload, place, steps, "nightly")]
            if workload == "mlp":  # whose steps are short; one a call costs the others nothing
                references.insert(0, _keras(workload, place, 1))
            if place.platform == "cpu":  # TensorFlow and PyTorch of the peers have only the CPU
                references += [_tensorflow(workload, place, steps), _torch(workload, place)]
            cases.append(
                Case(
                    name=_title(workload, place, f"{steps} a call"),
                    ours=_fit(workload, place, steps),
                    references=tuple(references),
                )
            )
        if place.num_devices == 1:
            cases.append(
                Case(
                    name=_title("mlp", place, "1 a call"),
                    ours=_fit("mlp", place, 1),
                    references=(_keras("mlp", place, 1), _keras("mlp", place, 1, "nightly")),
                    is_main=False,
                )
            )
    return cases


def loop_cases(places: Sequence[Place]) -> list[Case]:
    def case(name: str, workload: str, place: Place, steps: int) -> Case:
        references = [_scan("loop by hand", workload, place, steps)]
        if place.platform == "cpu":
            a_call = _steps(_STEPS_OF_A_LOOP)
            peer = tensorflow_side("TF run in tf.function", "loop", workload, place, **a_call)
            references.append(peer)
        return Case(
            name=_title(workload, place, name, f"{steps} a call"),
            ours=jax_side(name, "stratagem_loop", workload, place, **_steps(steps)),
            references=tuple(references),
            is_main=workload == "small_mlp" or steps == 1,
        )

    return [
        case(name, workload, place, steps)
        for place in places
        for workload in ("mlp", "small_mlp")
        for name, steps in (("run", 1), ("run_steps", _STEPS_OF_A_LOOP))
    ]


def input_cases(places: Sequence[Place]) -> list[Case]:
    """The ratio to the step alone is the share of the time in which the device is busy.

    The step stands in for an accelerator: it takes as long as one of Grain's workers needs to
    decode its batch, and leaves the cores to the host.
    """
    image_s = decoding_s()
    step_s = round(image_s * WORKLOADS["images"].batch_size, 4)

    def side(name: str, place: Place, module: str = "jax_grain", **options: Any) -> Side:
        return jax_side(name, module, "images", place, step_s=step_s, **options)

    times = f"{1e3 * image_s:.1f} ms each", f"{1e3 * step_s:.0f} ms a step"
    return [
        Case(
            name=_title("images", *times, place),
            ours=side("loop", place, "stratagem_input"),
            references=(
                side("step alone", place, "stratagem_input", data_on_device=True),
                side("input alone", place, kind="alone"),
                side("loop by hand", place, kind="loop"),
            ),
            is_main=place.num_devices == 1,
        )
        for place in places
        if place.platform == "cpu"
    ]


def _steps(steps_per_call: int) -> dict[str, int]:
    return {"steps_per_call": steps_per_call} if steps_per_call > 1 else {}


def _fit(workload: str, place: Place, steps: int) -> Side:
    return jax_side("fit", "stratagem_fit", workload, place, **_steps(steps))


def _scan(name: str, workload: str, place: Place, steps: int) -> Side:
    return jax_side(name, "jax_by_hand", workload, place, kind="scan", **_steps(steps))


def _keras(workload: str, place: Place, steps: int, environment: str = "ours") -> Side:
    """Keras itself on JAX, in our environment or the nightly build in its own.

    Not in that of the peers: with TensorFlow installed beside it, Keras imports it, for seconds.
    """
    name = "Keras DataParallel" if place.num_devices > 1 else "Keras on JAX"
    name += ", nightly" if environment == "nightly" else ""
    side = jax_side(f"{name}, {steps} a call", "keras_fit", workload, place, **_steps(steps))
    return dataclasses.replace(side, environment=environment)


def _tensorflow(workload: str, place: Place, steps: int) -> Side:
    several = place.num_devices > 1
    # Keras 3.15.1 with more fails under MirroredStrategy: "You must feed a value for placeholder".
    steps = 1 if several else steps
    name = "TF MirroredStrategy" if several else f"Keras on TensorFlow, {steps} a call"
    return tensorflow_side(name, "fit", workload, place, **_steps(steps))


def _torch(workload: str, place: Place) -> Side:
    # Each rank gets its share of the cores: with more, threads of the ranks wait for one another.
    threads_per_rank = max(1, (os.cpu_count() or 1) // place.num_devices)
    name = "PyTorch DDP" if place.num_devices > 1 else "PyTorch"
    variables = {"OMP_NUM_THREADS": str(threads_per_rank)}
    side = worker_side(name, "torch_ddp", "peers", variables, workload=workload)
    return dataclasses.replace(side, spread=functools.partial(rank_variables, place.num_devices))


_NUM_WORKERS = 2
_ONE, _TWO, _APART = "fit, 1 worker", "fit, 2 workers", "fit, 2 workers apart"
_DDP_ONE, _DDP_TWO = "PyTorch DDP, 1 worker", "PyTorch DDP, 2 workers"


def scaling(run: Run) -> None:
    """Measures efficiencies: a step of two workers trains on twice the data of one's.

    Two workers apart, which exchange nothing, tell what the machine leaves of it. PyTorch's DDP is
    the peer: two ranks over Gloo, on a core each as well.
    """
    # Only Linux lets a process choose its core.
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < _NUM_WORKERS:
        run.console.print("Skipped: each of two workers needs a core.")
        return
    called = [(name, WORKLOADS[name].steps_per_call) for name in _WANTED]
    for workload, steps in (*called, ("mlp", 1)):
        case = _workers_case(workload, steps)
        if not run.wants(case.name, is_main=case.is_main) or (run.effort.is_smallest and run.rows):
            continue
        for task, measured in run.measure(shortened(case) if run.effort.is_smallest else case):
            (figure,) = task.figures.values()
            speeds = {one.side.name: one.figures(figure) for one in measured}
            run.rows += _efficiencies(case.name, speeds, _WANTED[workload])


def _efficiencies(case: str, speeds: dict[str, list[float]], wanted: float) -> list[dict[str, Any]]:
    """Returns rows of ours beside one worker, beside workers apart, and beside DDP."""
    rows = [make_row(case, speeds[_TWO], speeds[name], name) for name in (_ONE, _APART)]
    rows = [row | {"has_peer": False} for row in rows]
    rows[1]["wanted"] = wanted
    if _DDP_TWO in speeds:
        ours = paired_ratios(speeds[_TWO], speeds[_ONE])
        theirs = paired_ratios(speeds[_DDP_TWO], speeds[_DDP_ONE])
        rows.append(make_row(f"{case}, efficiency", ours, theirs, _DDP_TWO, "of 1 worker"))
        rows.append(make_row(case, speeds[_TWO], speeds[_DDP_TWO], _DDP_TWO))
    return rows


def _workers_case(workload: str, steps: int) -> Case:
    examples = WORKLOADS[workload].batch_size

    def pinned(side: Side, make_variables: Callable[[], list[dict[str, str]]]) -> Side:
        def spread() -> list[dict[str, str]]:
            cores = sorted(os.sched_getaffinity(0))
            pairs = zip(cores, make_variables(), strict=False)
            return [{"BENCHMARK_CORE": str(core), **variables} for core, variables in pairs]

        return dataclasses.replace(side, spread=spread)

    def fit(name: str, num_workers: int, *, apart: bool = False) -> Side:
        batch_size = examples if apart else examples * num_workers
        side = worker_side(
            name,
            "stratagem_fit",
            variables={"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "TF_CONFIG": ""},
            workload=workload,
            batch_size=batch_size,
            pinned=True,
            **_steps(steps),
        )
        if apart or num_workers == 1:
            return pinned(side, lambda: [{}] * num_workers)
        return pinned(side, lambda: cluster_variables(num_workers))

    def ddp(name: str, num_ranks: int) -> Side:
        batch_size = examples * num_ranks
        variables = {"OMP_NUM_THREADS": "1"}
        side = worker_side(name, "torch_ddp", "peers", variables, workload=workload)
        side = side.replaced(batch_size=batch_size)
        return pinned(side, lambda: rank_variables(num_ranks))

    return Case(
        name=_title(workload, f"{examples} a worker", f"{steps} a call"),
        ours=fit(_TWO, _NUM_WORKERS),
        references=(
            fit(_ONE, 1),
            fit(_APART, _NUM_WORKERS, apart=True),
            ddp(_DDP_TWO, _NUM_WORKERS),
            ddp(_DDP_ONE, 1),
        ),
        is_main=steps > 1,
    )


def shortened(case: Case) -> Case:
    """Returns a case of training with epochs of one call, for the smallest size."""
    sides = (case.ours, *case.references)
    num_steps = max(side.options.get("steps_per_call", 1) for side in sides)
    return dataclasses.replace(
        case,
        ours=case.ours.replaced(steps_per_epoch=num_steps),
        references=tuple(one.replaced(steps_per_epoch=num_steps) for one in case.references),
    )
