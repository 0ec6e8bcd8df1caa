"""The predicted table: compiled programs, the formula, and what both assume, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cases import Environments, Place, jax_side
from benchmarks.report import Row
from benchmarks.runner import Effort
from benchmarks.scaling.hardware import Constant, GpuCluster, constants_of
from benchmarks.scaling.pictures import draw_predictions
from benchmarks.scaling.prediction import messages_bytes, predict
from benchmarks.scaling.programs import StepProgram
from benchmarks.worker_process import WorkerError, WorkerProcess
from benchmarks.workloads import WORKLOADS

__all__ = ["ASSUMPTIONS", "NUMBERS_OF_GPUS", "look_ahead", "prediction_rows", "read_program"]

NUMBERS_OF_GPUS = (8, 64, 512)

# Examples on one GPU. The small ones are those that are measured on CPUs, the two others what one
# trains on such GPUs.
_BATCH_SIZES = {
    "mlp": 128,
    "cnn": 128,
    "transformer": 64,
    "resnet50": 256,
    "large_transformer": 32,
}
_SLOW_TO_COMPILE = ("resnet50", "large_transformer")

ASSUMPTIONS = (
    "Predicted, not measured: no program of this table has run on these GPUs.",
    "Each GPU has the same batch on any number of GPUs; efficiency is its time on one GPU over "
    "that on n. At least: the shortest computing, and nothing of the exchange hidden behind it. "
    "At most: the longest, and all of it hidden.",
    "Programs are compiled for CPU. Their FLOPs and summed bytes are those of the GPU's; the bytes "
    "that they access are more, because a GPU's compiler fuses more and bfloat16 stays as short.",
    "The step is what FLOPs and bytes allow: starting kernels, input, stragglers and the traffic "
    "of others are left out. A step that takes longer, for whatever reason, scales better.",
    "Every GPU has a network port, and the network behind it has no bottleneck.",
)


def look_ahead(
    environments: Environments,
    effort: Effort,
    console: Console,
    folder: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> dict[str, Any]:
    """Compiles the steps, predicts, prints the tables and draws them.

    Args:
        environments: whose own interpreter compiles.
        effort: how long a compilation may take.
        console: to print to.
        folder: for the picture.
        only: workloads whose title contains this.
        is_smallest: leaves out what takes long to compile.

    Returns:
        What is written to the file: the rows, the constants, the assumptions, and what failed.
    """
    names = [name for name in _BATCH_SIZES if only in WORKLOADS[name].title]
    if is_smallest:
        names = [name for name in names if name not in _SLOW_TO_COMPILE]
    steps: list[StepProgram] = []
    failures: list[dict[str, str]] = []
    for name in names:
        try:
            steps.append(read_program(name, _BATCH_SIZES[name], environments, effort))
        except WorkerError as error:
            failures.append({"case": f"program of {name}", "error": str(error)})
    cluster = GpuCluster()
    rows = [row for step in steps for row in prediction_rows(step, cluster)]
    constants = constants_of(cluster)
    if rows:
        console.print(_table(rows))
        console.print(_table_of_constants(constants))
        for sentence in ASSUMPTIONS:
            console.print(f"- {sentence}", markup=False)
        draw_predictions(folder / "scaling_predicted.png", rows)
    for failure in failures:
        console.print(f"Failed: {failure['case']}\n{failure['error']}", style="red", markup=False)
    return {
        "rows": rows,
        "constants": [dataclasses.asdict(constant) for constant in constants],
        "assumptions": list(ASSUMPTIONS),
        "failures": failures,
    }


def read_program(
    workload: str, batch_size: int, environments: Environments, effort: Effort
) -> StepProgram:
    """Compiles a workload's training step in a process of its own, and reads the program.

    Args:
        workload: key of `WORKLOADS`.
        batch_size: of one device.
        environments: whose own interpreter compiles.
        effort: how long that may take.

    Raises:
        WorkerError: the process failed, or took too long.
    """
    place = Place("cpu", 2)
    side = jax_side(
        f"program of {workload}",
        "compiled_step",
        workload,
        place,
        batch_size=batch_size * place.num_devices,
    )
    command, variables = environments.command(side), environments.variables(side)
    with WorkerProcess(side.name, command, variables) as worker:
        return StepProgram.from_answer(worker.read_answer(effort.answer_limit_s))


def prediction_rows(step: StepProgram, cluster: GpuCluster) -> list[Row]:
    """Returns a row for each number of GPUs."""
    program = {
        "workload": step.title,
        "batch_size": step.batch_size,
        "num_parameters": step.num_parameters,
        "dtype": step.dtype,
        "flops": step.flops,
        "accessed_bytes": step.accessed_bytes,
        "reduced_bytes": step.reduced_bytes,
        "num_reduced_arrays": len(step.reductions),
        "num_messages": len(messages_bytes(step.reductions, cluster.combined_bytes)),
    }
    predictions = [predict(step, num_gpus, cluster) for num_gpus in NUMBERS_OF_GPUS]
    return [
        {
            **program,
            **dataclasses.asdict(prediction),
            "lowest_efficiency": prediction.lowest_efficiency,
            "highest_efficiency": prediction.highest_efficiency,
        }
        for prediction in predictions
    ]


def _table(rows: Sequence[Row]) -> Table:
    table = Table(
        title="scaling: predicted for H100 in hosts of 8, nothing of it measured",
        title_justify="left",
    )
    table.add_column("a step of one GPU")  # the one that is folded where the line is too short
    for header in ("GFLOP", "MB\naccessed", "MB\nsummed", "messages", "computing,\nms"):
        table.add_column(header, justify="right", no_wrap=True)
    for header in ("GPUs", "exchange,\nms", "efficiency"):
        table.add_column(header, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        is_first = row["workload"] != previous
        if is_first and previous is not None:
            table.add_section()
        table.add_row(
            *(_cells_of_program(row) if is_first else [""] * 6),
            str(row["num_gpus"]),
            _ms(row["exchange_s"]),
            f"{row['lowest_efficiency']:.2f} to {row['highest_efficiency']:.2f}",
        )
        previous = row["workload"]
    return table


def _cells_of_program(row: Row) -> list[str]:
    return [
        f"{row['workload']}, {row['batch_size']} a GPU",
        f"{row['flops'] / 1e9:,.1f}",
        f"{row['accessed_bytes'] / 1e6:,.0f}",
        f"{row['reduced_bytes'] / 1e6:,.2f}",
        str(row["num_messages"]),
        f"{_ms(row['shortest_compute_s'])} to {_ms(row['longest_compute_s'])}",
    ]


def _table_of_constants(constants: Sequence[Constant]) -> Table:
    table = Table(title="what the prediction takes for given", title_justify="left")
    for header in ("figure", "value", "source"):
        table.add_column(header)
    for constant in constants:
        value = f"{constant.value:.4g} {constant.unit}".strip()
        table.add_row(constant.text, value, constant.source)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
