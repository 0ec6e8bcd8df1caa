"""State kept in memory after each step: a group that is started again goes on from there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.matching import match
from stratagem.checkpoint.objects import Part, state_of
from stratagem.checkpoint.together import done_by_all
from stratagem.checkpoint.told_saves import step_of_run, tell_restored, telling_of_keeping
from stratagem.checkpoint.values import (
    give_own,
    has_components,
    lies_in_parts,
    own_arrays_of,
    own_values_of,
)
from stratagem.group import current_group
from stratagem.storage import MemorySlots, Snapshot

__all__ = ["MemoryBackup"]


class MemoryBackup:
    """Keeps the state of a checkpoint's objects in memory that outlives the process.

    Each process keeps what it has, without asking another one, and finds it again when it is
    started again on the same machine. A machine that stops takes it along: that is what
    checkpoints are for.

    Args:
        checkpoint: whose objects.
        folder: one of a file system in memory, of this run alone; several may share one, by name.
        name: of this backup, the same in all processes and after a restart.

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
        """Keeps the state, beside the one before.

        Args:
            number: of the step, the same on all processes, and larger each time.

        Returns:
            How long that took, in seconds; the wait for the devices is not counted.

        Raises:
            OSError: there is not enough memory.
            TypeError: an object has a state that JSON cannot hold.
        """
        parts = self._checkpoint.parts()
        arrays = {name: own_arrays_of(part) for name, part in parts.items()}
        begun_s = time.monotonic()
        with telling_of_keeping():
            values = {name: own_values_of(part, arrays[name]) for name, part in parts.items()}
            notes = {
                "states": {
                    name: one.source.get_state() for name, one in parts.items() if one.source
                },
                "components": {name: _shapes_of_divided(part) for name, part in parts.items()},
                "num_processes": _num_processes(),
                **step_of_run(),
            }
            try:
                self._slots.put(number, values, notes)
            except TypeError:
                for part in parts.values():
                    if part.source:
                        state_of(part)  # raises whose state it is
                raise
        return time.monotonic() - begun_s

    def restore(self) -> int | None:
        """Gives all objects the newest state that every process has. Call on every process.

        What is newer, on those that were a step ahead, is forgotten; all is, where some process
        has none, or has that of other objects.

        Returns:
            The number with which it was saved; None where nothing was changed.
        """
        parts = self._checkpoint.parts()
        fitting = {
            one.number: (one, paths)
            for one in self._slots.get()
            if (paths := _matched(one, parts)) is not None
        }
        group = current_group()
        told = [list(fitting)]
        if group is not None:
            told = group.exchange("MemoryBackup.restore", list(fitting))
        common = set(told[0]).intersection(*told[1:])
        number = max(common, default=None)
        done_by_all("MemoryBackup.restore", lambda: self._slots.forget_after(number))
        if number is None:
            return None
        snapshot, paths = fitting[number]
        for name, part in parts.items():
            # Copies: JAX may take an array's memory as it is, and the next snapshots go over this.
            values = {path: array.copy() for path, array in snapshot.items[name].items()}
            give_own(part, paths[name], values)
            if part.source is not None:
                part.source.set_state(snapshot.notes["states"][name])
            if part.tree is not None:
                self._checkpoint.attach(name, part.tree.restored())
        tell_restored(snapshot.notes, "memory")
        return number

    def forget(self) -> None:
        """Forgets what this process has kept."""
        self._slots.forget_after(None)


def _num_processes() -> int:
    group = current_group()
    return 1 if group is None else group.num_processes


def _shapes_of_divided(part: Part) -> dict[str, list[int]]:
    """Of what each process has components or parts of the shape of the value."""
    return {
        path: list(variable.shape)
        for path, variable in part.variables.items()
        if has_components(variable) or lies_in_parts(variable)
    }


def _matched(snapshot: Snapshot, parts: Mapping[str, Part]) -> dict[str, dict[str, str]] | None:
    """Which array belongs to which variable; None for those of other objects or replicas."""
    states = {name for name, part in parts.items() if part.source is not None}
    if snapshot.items.keys() != parts.keys() or snapshot.notes["states"].keys() != states:
        return None
    # With fewer processes some components are gone.
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
        own = own_values_of(part, own_arrays_of(part))
        for path, kept_path in found[name].items():
            if own[path].shape != arrays[kept_path].shape:
                return None
            if own[path].dtype != arrays[kept_path].dtype:
                return None
    return found
