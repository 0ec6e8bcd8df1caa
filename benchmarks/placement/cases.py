"""What is trained, and where its variables are kept."""

from __future__ import annotations

import dataclasses

from benchmarks.cases import Side
from benchmarks.workers.placement_work import PlacementOptions
from benchmarks.workers.protocol import WorkerOptions

__all__ = ["CASES", "Case", "Placed", "case_on_gpu", "table_bytes_for"]

_NUM_CPU_DEVICES = 3
_POOL_THREADS_PER_DEVICE = 4
_SMALLEST_ROWS, _SMALLEST_PLACEMENTS = 4_000, ("mirrored", "state in parts", "central")

# 20 GB in rows of 64 numbers; below this there is nothing to show.
_LARGE_TABLE_BYTES = 20 * 10**9
_LEAST_TABLE_BYTES = 10**9
# Table and what Adagrad keeps of it, once more while they are made; a gradient of the whole table,
# where that is what a step makes.
_TABLES_OF_ROWS = 3.0
_TABLES_OF_WHOLE = 6.0


@dataclasses.dataclass(frozen=True)
class Placed:
    """A side: one way to keep the variables.

    Args:
        name: in tables.
        options: of its worker.
    """

    name: str
    options: PlacementOptions


@dataclasses.dataclass(frozen=True)
class Case:
    """Sides that train the same.

    Args:
        name: in tables.
        sides: the first is what the others are compared with.
        other_device: the one that is no replica's.
        variables: of the workers' environment.
        together: whether all sides are started at once, and take turns.
    """

    name: str
    sides: tuple[Placed, ...]
    other_device: str
    variables: dict[str, str]
    together: bool = True

    def side(self, placed: Placed) -> Side:
        """Returns what runs a side."""
        return Side(
            name=placed.name,
            module="benchmarks.workers.stratagem_placement",
            options=WorkerOptions(workload=""),
            variables=self.variables,
        )

    def smallest(self) -> Case:
        """Returns the same with a small table, and three of the sides."""
        small = {"num_rows": _SMALLEST_ROWS, "batch_size": 64}
        sides = [
            dataclasses.replace(one, options=dataclasses.replace(one.options, **small))
            for one in self.sides
            if one.options.placement in _SMALLEST_PLACEMENTS
        ]
        return dataclasses.replace(self, sides=tuple(sides))


_SIDES = {
    "Mirrored": "mirrored",
    "shard_state=all": "state in parts",
    "Hybrid, sharded": "hybrid, sharded",
    "Hybrid, central": "hybrid, central",
    "CentralStorage": "central",
    "Hybrid, pinned_host": "hybrid, pinned",
}


def _on_cpu(name: str, optimizer: str) -> Case:
    return Case(
        name,
        sides=tuple(
            Placed(side, PlacementOptions(placement=key, optimizer=optimizer, num_rows=400_000))
            for side, key in _SIDES.items()
        ),
        other_device="cpu:2",
        variables={
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(_NUM_CPU_DEVICES),
            "NPROC": str(_POOL_THREADS_PER_DEVICE * _NUM_CPU_DEVICES),
        },
    )


CASES = (
    _on_cpu("Adagrad: updates of rows", "adagrad"),
    _on_cpu("Adam: updates of the whole table", "adam"),
)


def case_on_gpu(table_bytes: int, gpu_bytes: int, compute: str = "gpu:0") -> Case:
    """Returns the table on the host beside all on one accelerator.

    Args:
        table_bytes: of the table.
        gpu_bytes: memory of the accelerator.
        compute: its name.
    """
    options = PlacementOptions(
        placement="central",
        optimizer="adagrad",
        num_rows=table_bytes // (4 * 64),
        batch_size=4096,
        devices=(compute,),
        parameter_device=compute,
    )
    on_host = dataclasses.replace(options, parameter_device="cpu:0")
    sides = [
        Placed("all on the GPU", options),
        Placed("CentralStorage", on_host),
        Placed("Hybrid, central", dataclasses.replace(on_host, placement="hybrid, central")),
    ]
    if _TABLES_OF_WHOLE * table_bytes <= gpu_bytes:
        whole = dataclasses.replace(options, placement="mirrored")
        sides.append(Placed("Mirrored", whole))
    return Case(
        f"one GPU, a table of {table_bytes / 1e9:.3g} GB",
        sides=tuple(sides),
        other_device="cpu:0",
        variables={
            "KERAS_BACKEND": "jax",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
        },
        together=False,
    )


def table_bytes_for(gpu_bytes: int, host_bytes: int) -> int | None:
    """Returns how large the table is that a machine can hold in both ways.

    Args:
        gpu_bytes: memory of the GPU.
        host_bytes: of the host, as far as it is free.

    Returns:
        20 GB, or less where memory lacks; None below 1 GB.
    """
    size = min(_LARGE_TABLE_BYTES, int(min(gpu_bytes, host_bytes) / _TABLES_OF_ROWS))
    return size if size >= _LEAST_TABLE_BYTES else None
