"""In-memory backups of training state, for fast recovery after a restart."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.latest import run_on_all
from stratagem.checkpoint.objects import Part, state_of
from stratagem.checkpoint.restoring import (
    assign_local_values,
    has_components,
    is_sharded_over_processes,
    local_arrays_of,
    local_values_of,
    match,
)
from stratagem.checkpoint.saving import record_memory_save, record_restore, step_of_run
from stratagem.checkpoint.storage.staging import MemorySlots, Snapshot
from stratagem.group.current import current_group


class MemoryBackup:
    """Saves the state of a checkpoint's objects in memory that outlives the process.

    Each process saves its state without communication, and finds it when it restarts on the
    same machine. The backup is lost with the machine; combine it with checkpoints on disk.

    Args:
        checkpoint: objects to back up.
        folder: folder on an in-memory file system, used by this run only. Several backups may
            share it under different names.
        name: name of this backup, the same in all processes and after a restart.

    Raises:
        OSError: the folder cannot be written.

    Example:
        >>> import tempfile
        >>> step = sg.Variable(7, dtype="int32")
        >>> checkpoint = sg.train.Checkpoint(step=step)
        >>> with tempfile.TemporaryDirectory() as folder:  # in /dev/shm, to outlive the process
        ...     cost_s = sg.checkpoint.MemoryBackup(checkpoint, folder).save(7)
        ...     _ = step.assign(0)
        ...     sg.checkpoint.MemoryBackup(checkpoint, folder).restore(), int(step)
        (7, 7)

    Source: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
    Checkpoints", SOSP 2023.
    """

    def __init__(
        self, checkpoint: Checkpoint, folder: str | os.PathLike[str], name: str = "backup"
    ) -> None:
        group = current_group()
        process_id = 0 if group is None else group.process_id
        self._checkpoint = checkpoint
        self._slots = MemorySlots(folder, f"{name}.process-{process_id}")

    def save(self, number: int) -> float:
        """Saves the state; retains the previous backup.

        Args:
            number: number of the step, the same on all processes, larger each time.

        Returns:
            Duration in seconds, without the wait for the devices.

        Raises:
            OSError: not enough memory.
            TypeError: the state of an object cannot be stored as JSON.
        """
        parts = self._checkpoint.parts()
        arrays = {name: local_arrays_of(part) for name, part in parts.items()}
        begun_s = time.monotonic()
        with record_memory_save():
            values = {name: local_values_of(part, arrays[name]) for name, part in parts.items()}
            notes = {
                "states": {
                    name: one.source.get_state() for name, one in parts.items() if one.source
                },
                "components": {name: _whole_shapes(part) for name, part in parts.items()},
                "num_processes": _num_processes(),
                **step_of_run(),
            }
            try:
                self._slots.put(number, values, notes)
            except TypeError:
                for part in parts.values():
                    if part.source:
                        state_of(part)  # raises an error that names the object
                raise
        return time.monotonic() - begun_s

    def restore(self) -> int | None:
        """Restores the newest state that every process has. Call on every process.

        Newer backups, on processes that were a step ahead, are deleted. If a process has no backup,
        or backups of other objects, all are deleted.

        Returns:
            Number of the restored step, or None if nothing was restored.
        """
        parts = self._checkpoint.parts()
        matching = {
            one.number: (one, paths)
            for one in self._slots.get()
            if (paths := _match_snapshot(one, parts)) is not None
        }
        group = current_group()
        numbers = [list(matching)]
        if group is not None:
            numbers = group.exchange("MemoryBackup.restore", list(matching))
        common = set(numbers[0]).intersection(*numbers[1:])
        number = max(common, default=None)
        run_on_all("MemoryBackup.restore", lambda: self._slots.forget_after(number))
        if number is None:
            return None
        snapshot, paths = matching[number]
        for name, part in parts.items():
            # Copy: JAX may alias an array's memory, which the next snapshots overwrite.
            values = {path: array.copy() for path, array in snapshot.items[name].items()}
            assign_local_values(part, paths[name], values)
            if part.source is not None:
                part.source.set_state(snapshot.notes["states"][name])
            if part.tree is not None:
                self._checkpoint.attach(name, part.tree.restored())
        record_restore(snapshot.notes, "memory")
        return number

    def forget(self) -> None:
        """Deletes all backups of this process."""
        self._slots.forget_after(None)


def _num_processes() -> int:
    group = current_group()
    return 1 if group is None else group.num_processes


def _whole_shapes(part: Part) -> dict[str, list[int]]:
    """Returns the whole shapes of variables with components or shards per process."""
    return {
        path: list(variable.shape)
        for path, variable in part.variables.items()
        if has_components(variable) or is_sharded_over_processes(variable)
    }


def _match_snapshot(
    snapshot: Snapshot, parts: Mapping[str, Part]
) -> dict[str, dict[str, str]] | None:
    """Returns the array path of each variable by object; None if objects or replicas differ."""
    states = {name for name, part in parts.items() if part.source is not None}
    if snapshot.items.keys() != parts.keys() or snapshot.notes["states"].keys() != states:
        return None
    # With fewer processes, some components are missing.
    is_divided = any(snapshot.notes["components"].values())
    if is_divided and snapshot.notes["num_processes"] != _num_processes():
        return None
    found: dict[str, dict[str, str]] = {}
    for name, part in parts.items():
        arrays, shapes = snapshot.items[name], snapshot.notes["components"][name]
        entries = [
            {
                "path": path,
                "shape": tuple(shapes.get(path, array.shape)),
                "dtype": str(array.dtype),
            }
            for path, array in arrays.items()
        ]
        try:
            found[name] = match(part, entries, "memory")
        except ValueError:
            return None
        own = local_values_of(part, local_arrays_of(part))
        for path, stored_path in found[name].items():
            if own[path].shape != arrays[stored_path].shape:
                return None
            if own[path].dtype != arrays[stored_path].dtype:
                return None
    return found
