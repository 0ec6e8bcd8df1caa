"""Where the chips of a TPU are: which coordinates the devices of each host have."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stratagem.messages import explain
from stratagem.topology.topology_message import TopologyMessage

__all__ = ["TPUTopology"]

Coordinates = npt.NDArray[np.int32]


class TPUTopology:
    """Describes the devices of a TPU: the shape of the mesh, and where in it each device is.

    Args:
        serialized: what `serialized` of another topology returned; then the others are not used.
        mesh_shape: 4 positive numbers: of chips along x, y and z, and of cores a chip.
        device_coordinates: array of shape (tasks, devices of a task, 4): the place of each device
            in the mesh.

    Raises:
        ValueError: arguments of another form.

    Example:
        >>> topology = sg.tpu.experimental.Topology(
        ...     mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]]
        ... )
        >>> topology.num_tasks, topology.num_tpus_per_task
        (1, 2)

    Source: TF 2.21 tpu/topology.py, Topology.
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: Any = None,
        device_coordinates: Any = None,
    ) -> None:
        if serialized:
            message = TopologyMessage.parse(serialized)
            mesh_shape, device_coordinates = message.mesh_shape, message.coordinates()
        self._mesh_shape = _integers(mesh_shape)
        if self._mesh_shape.shape != (4,) or (self._mesh_shape < 1).any():
            raise ValueError(
                explain(
                    f"mesh_shape={mesh_shape!r} is no shape of a mesh.",
                    expected="4 positive numbers: chips along x, y and z, and cores a chip.",
                    fix="pass [4, 4, 1, 1], for example.",
                )
            )
        self._device_coordinates = _integers(device_coordinates)
        shape = self._device_coordinates.shape
        if len(shape) != 3 or shape[2] != 4:
            raise ValueError(
                explain(
                    f"device_coordinates has shape {shape}.",
                    expected="shape (tasks, devices of a task, 4).",
                    fix="give the coordinates x, y, z and core of each device.",
                )
            )
        if ((self._device_coordinates < 0) | (self._device_coordinates >= self._mesh_shape)).any():
            raise ValueError(
                explain(
                    "device_coordinates has places outside of the mesh.",
                    expected=f"places from 0 to below {self._mesh_shape.tolist()}.",
                    fix="correct them, or mesh_shape.",
                )
            )
        self._tasks, self._ordinals = self._inverted()

    def _inverted(self) -> tuple[Coordinates, Coordinates]:
        """For each place the task and the number of its device there; -1 where there is none."""
        tasks = np.full(self._mesh_shape, -1, np.int32)
        ordinals = np.full(self._mesh_shape, -1, np.int32)
        for task, devices in enumerate(self._device_coordinates):
            for ordinal, place in enumerate(devices):
                tasks[tuple(place)] = task
                ordinals[tuple(place)] = ordinal
        return tasks, ordinals

    @property
    def mesh_shape(self) -> Coordinates:
        """Chips along x, y and z, and cores a chip."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of dimensions of the mesh: 4."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> Coordinates:
        """The place of each device, of shape (tasks, devices of a task, 4)."""
        return self._device_coordinates

    @property
    def missing_devices(self) -> npt.NDArray[np.int64]:
        """The places of the mesh that have no device, a row each."""
        return np.argwhere(self._tasks < 0)

    @property
    def num_tasks(self) -> int:
        """The number of hosts: of processes of JAX."""
        return self._device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of a host."""
        return self._device_coordinates.shape[1]

    def task_ordinal_at_coordinates(self, device_coordinates: Any) -> int:
        """Returns the number of the task whose device is at a place; -1 where there is none.

        Args:
            device_coordinates: x, y, z and core.
        """
        return int(self._tasks[tuple(device_coordinates)])

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Any) -> int:
        """Returns the number of the device at a place among those of its task; -1 without one.

        Args:
            device_coordinates: x, y, z and core.
        """
        return int(self._ordinals[tuple(device_coordinates)])

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Any, job: str | None = None
    ) -> str:
        """Returns the name of the host of the device at a place.

        Args:
            device_coordinates: x, y, z and core.
            job: the task type, which the name begins with.
        """
        return f"{self._task_name(device_coordinates, job)}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Any, job: str | None = None
    ) -> str:
        """Returns the name of the device at a place.

        Args:
            device_coordinates: x, y, z and core.
            job: the task type, which the name begins with.
        """
        ordinal = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return f"{self._task_name(device_coordinates, job)}/device:TPU:{ordinal}"

    def _task_name(self, device_coordinates: Any, job: str | None) -> str:
        task = f"/task:{self.task_ordinal_at_coordinates(device_coordinates)}"
        return task if job is None else f"/job:{job}{task}"

    def serialized(self) -> bytes:
        """Returns the topology as a message that TensorFlow reads too (`TopologyProto`)."""
        message = TopologyMessage(
            mesh_shape=self._mesh_shape.tolist(),
            num_tasks=self.num_tasks,
            num_devices=self.num_tpus_per_task,
            flat_coordinates=self._device_coordinates.ravel().tolist(),
        )
        return message.to_bytes()


def _integers(values: Any) -> Coordinates:
    return np.asarray([] if values is None else values, np.int32)
