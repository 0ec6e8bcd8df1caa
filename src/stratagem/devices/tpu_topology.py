"""`TPUTopology`: the shape of a TPU's mesh, and the coordinates of each host's devices."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from stratagem.devices.topology_message import TopologyMessage
from stratagem.messages import explain

Coordinates = npt.NDArray[np.int32]


class TPUTopology:
    """The devices of a TPU: the shape of its mesh, and the coordinates of each device.

    Args:
        serialized: result of another topology's `serialized()`; the other arguments are then
            ignored.
        mesh_shape: 4 positive ints: chips along x, y and z, and cores per chip.
        device_coordinates: int array of shape (tasks, devices per task, 4): x, y, z and core of
            each device.

    Raises:
        ValueError: an argument of another shape, or coordinates outside the mesh.

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
        mesh_shape: object = None,
        device_coordinates: object = None,
    ) -> None:
        if serialized:
            message = TopologyMessage.parse(serialized)
            mesh_shape, device_coordinates = message.mesh_shape, message.coordinates()
        self._mesh_shape = _as_int_array(mesh_shape)
        if self._mesh_shape.shape != (4,) or (self._mesh_shape < 1).any():
            raise ValueError(
                explain(
                    f"mesh_shape={mesh_shape!r} is not a valid mesh shape.",
                    expected="4 positive ints: chips along x, y and z, and cores per chip.",
                    fix="pass [4, 4, 1, 1], for example.",
                )
            )
        self._device_coordinates = _as_int_array(device_coordinates)
        shape = self._device_coordinates.shape
        if len(shape) != 3 or shape[2] != 4:
            raise ValueError(
                explain(
                    f"device_coordinates has shape {shape}.",
                    expected="shape (tasks, devices per task, 4).",
                    fix="pass the coordinates x, y, z and core of each device.",
                )
            )
        if ((self._device_coordinates < 0) | (self._device_coordinates >= self._mesh_shape)).any():
            raise ValueError(
                explain(
                    "device_coordinates has coordinates outside the mesh.",
                    expected=f"coordinates from 0 to below {self._mesh_shape.tolist()}.",
                    fix="correct device_coordinates or mesh_shape.",
                )
            )
        self._tasks, self._ordinals = self._invert()

    def _invert(self) -> tuple[Coordinates, Coordinates]:
        """Returns the task and device index at each position, -1 where there is no device."""
        tasks = np.full(self._mesh_shape, -1, np.int32)
        ordinals = np.full(self._mesh_shape, -1, np.int32)
        for task, devices in enumerate(self._device_coordinates):
            for ordinal, position in enumerate(devices):
                tasks[tuple(position)] = task
                ordinals[tuple(position)] = ordinal
        return tasks, ordinals

    @property
    def mesh_shape(self) -> Coordinates:
        """Chips along x, y and z, and cores per chip."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """Number of dimensions of the mesh: 4."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> Coordinates:
        """Coordinates of each device, of shape (tasks, devices per task, 4)."""
        return self._device_coordinates

    @property
    def missing_devices(self) -> npt.NDArray[np.int64]:
        """Coordinates without a device, of shape (missing, 4)."""
        return np.argwhere(self._tasks < 0)

    @property
    def num_tasks(self) -> int:
        """Number of hosts, which is the number of JAX processes."""
        return self._device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """Number of devices per host."""
        return self._device_coordinates.shape[1]

    def task_ordinal_at_coordinates(self, device_coordinates: Iterable[int]) -> int:
        """Returns the index of the task whose device is at the coordinates, or -1.

        Args:
            device_coordinates: x, y, z and core.
        """
        return int(self._tasks[tuple(device_coordinates)])

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Iterable[int]) -> int:
        """Returns the index, within its task, of the device at the coordinates, or -1.

        Args:
            device_coordinates: x, y, z and core.
        """
        return int(self._ordinals[tuple(device_coordinates)])

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Iterable[int], job: str | None = None
    ) -> str:
        """Returns the device name of the host of the device at the coordinates.

        Args:
            device_coordinates: x, y, z and core.
            job: task type to prefix the name with, or None.
        """
        return f"{self._task_name(device_coordinates, job)}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Iterable[int], job: str | None = None
    ) -> str:
        """Returns the name of the device at the coordinates.

        Args:
            device_coordinates: x, y, z and core.
            job: task type to prefix the name with, or None.
        """
        ordinal = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return f"{self._task_name(device_coordinates, job)}/device:TPU:{ordinal}"

    def _task_name(self, device_coordinates: Iterable[int], job: str | None) -> str:
        task = f"/task:{self.task_ordinal_at_coordinates(device_coordinates)}"
        return task if job is None else f"/job:{job}{task}"

    def serialized(self) -> bytes:
        """Returns the topology as a serialized `TopologyProto`, which TensorFlow reads, too."""
        message = TopologyMessage(
            mesh_shape=self._mesh_shape.tolist(),
            num_tasks=self.num_tasks,
            num_devices=self.num_tpus_per_task,
            flat_coordinates=self._device_coordinates.ravel().tolist(),
        )
        return message.to_bytes()


def _as_int_array(values: object) -> Coordinates:
    return np.asarray([] if values is None else values, np.int32)
