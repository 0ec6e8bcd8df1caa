"""Named objects, saved and restored together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from stratagem.background_errors import raise_reported
from stratagem.checkpoint.matching import match
from stratagem.checkpoint.objects import Part, part_of, state_of
from stratagem.checkpoint.options import CheckpointOptions
from stratagem.checkpoint.saving import Place, load_arrays, load_manifest, save, wait_for_writing
from stratagem.checkpoint.sharing import shared_by_first
from stratagem.checkpoint.together import done_by_all, done_by_first, is_first
from stratagem.checkpoint.told_saves import step_of_run, tell_restored
from stratagem.checkpoint.values import components_of, give, values_of
from stratagem.messages import explain
from stratagem.storage import Arrays

__all__ = ["Checkpoint"]

# Where `keras.Model.load_weights` looks for a model's state.
_KERAS_ITEM = "pytree"
_COUNTER = "save_counter"
# Beside the aggregates, which are what other numbers of replicas go on with.
_COMPONENTS = "components"


class Checkpoint:
    """Saves named objects together, and restores them under any strategy.

    Values are those that all replicas' copies stand for: what is saved under one strategy, or none,
    is restored under any other, on any number of devices and processes. The folder is one of
    Orbax's; Keras from 3.14 on reads the first model's weights from it with
    `model.load_weights(path)`.

    Args:
        root: one object; it is saved under the name "root".
        **kwargs: objects by name: Keras models, layers, optimizers, metrics, seed generators and
            variables, dicts from names to variables, and what has `get_state()` and
            `set_state()`, such as an iterator of a distributed dataset.

    Raises:
        TypeError: an object of another kind.

    Example:
        >>> import tempfile
        >>> with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     step = sg.Variable(7, dtype="int32")
        >>> plain = keras.Variable(0, dtype="int32")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = sg.train.Checkpoint(step=step).save(folder + "/ckpt")
        ...     sg.train.Checkpoint(step=plain).restore(path)
        >>> int(plain.value)
        7

    Source: TF 2.21 checkpoint.py, Checkpoint.
    """

    def __init__(self, root: Any = None, **kwargs: Any) -> None:
        self._objects: dict[str, Any] = ({} if root is None else {"root": root}) | kwargs
        if _COUNTER in kwargs:
            raise ValueError(
                explain(
                    f"Checkpoint got an object called {_COUNTER}.",
                    expected="another name: the checkpoint counts its saves under this one.",
                    fix="rename it.",
                )
            )
        for name, value in self._objects.items():
            _check_kind(name, value)
        self.save_counter = keras.Variable(0, dtype="int32", trainable=False, name=_COUNTER)

    def save(
        self, file_prefix: str | os.PathLike[str], options: CheckpointOptions | None = None
    ) -> str:
        """Saves under a name with a number, which counts up. Call on every process.

        Args:
            file_prefix: folder and beginning of the name, such as "runs/ckpt".
            options: how it is written.

        Returns:
            The path, such as "runs/ckpt-1": on every process that of process 0, which writes.

        Raises:
            OSError: it could not be written; what was there before still is.
            ValueError: an object has no variables yet.
        """
        return self.save_as(f"{os.fspath(file_prefix)}-{int(self.save_counter) + 1}", options)

    def save_as(
        self,
        path: str | os.PathLike[str],
        options: CheckpointOptions | None = None,
        *,
        place: Place | None = None,
    ) -> str:
        """Saves under a name as it is, and counts it. Call on every process.

        Args:
            path: where; nothing may be there.
            options: how it is written.
            place: prepares the folder and follows it up, on process 0.

        Returns:
            The path.

        Raises:
            OSError: it could not be written; what was there before still is.
            TypeError: an object has a state that JSON cannot hold.
            ValueError: an object has no variables yet.
        """
        before = int(self.save_counter)
        self.save_counter.assign(before + 1)
        try:
            return self._write(path, options, place)
        except Exception:
            self.save_counter.assign(before)
            raise

    def write(
        self, file_prefix: str | os.PathLike[str], options: CheckpointOptions | None = None
    ) -> str:
        """Saves under a name as it is. Call on every process.

        Args:
            file_prefix: the path; nothing may be there.
            options: how it is written.

        Returns:
            The path.

        Raises:
            OSError: it could not be written; what was there before still is.
            ValueError: an object has no variables yet.
        """
        return self._write(file_prefix, options, None)

    def sync(self) -> None:
        """Waits until what is written behind training is there. Call on every process.

        Raises:
            OSError: it could not be written, and no step has raised that yet.
        """
        done_by_first("Checkpoint.sync", wait_for_writing)

    def restore(
        self, save_path: str | os.PathLike[str], options: CheckpointOptions | None = None
    ) -> None:
        """Gives all objects, and the counter of saves, the state of a checkpoint.

        Nothing is changed if anything does not fit. Call on every process; process 0 reads.

        Args:
            save_path: what `save` returned.
            options: how it is read.

        Raises:
            DataLossError: the checkpoint is damaged.
            NotFoundError: there is none.
            ValueError: the checkpoint is of other objects, or shapes differ.
        """
        self._read(save_path, self.parts(), options)

    def read(
        self, save_path: str | os.PathLike[str], options: CheckpointOptions | None = None
    ) -> None:
        """Gives all objects the state of a checkpoint, and leaves the counter of saves.

        Args:
            save_path: what `write` or `save` returned.
            options: how it is read.

        Raises:
            DataLossError: the checkpoint is damaged.
            NotFoundError: there is none.
            ValueError: the checkpoint is of other objects, or shapes differ.
        """
        parts = self.parts()
        del parts[_COUNTER]
        self._read(save_path, parts, options)

    def parts(self) -> dict[str, Part]:
        """Returns the objects and the counter of saves, taken apart into their variables.

        Raises:
            ValueError: an object has no variables yet.
        """
        named = {**self._objects, _COUNTER: self.save_counter}
        return {name: part_of(name, value) for name, value in named.items()}

    def _write(
        self,
        path: str | os.PathLike[str],
        options: CheckpointOptions | None,
        place: Place | None,
    ) -> str:
        raise_reported()
        parts = self.parts()
        # Reading what has a component on each replica takes all processes.
        items = _item_names(parts)
        arrays = {items[name]: values_of(part) for name, part in parts.items()}
        arrays[_COMPONENTS] = {
            f"{items[name]}/{path}": components
            for name, part in parts.items()
            for path, components in components_of(part).items()
        }
        notes = {
            "objects": {name: {"kind": p.kind, "item": items[name]} for name, p in parts.items()},
            "states": {name: state_of(part) for name, part in parts.items() if part.source},
            **step_of_run(),
        }
        folder = Path(os.fspath(path)).absolute()
        written = save(arrays, notes, place or Place(folder), options or CheckpointOptions())
        # A worker may name a folder of its own, in which nothing is written.
        return os.fspath(path) if written == folder else str(written)

    def _read(
        self,
        save_path: str | os.PathLike[str],
        parts: Mapping[str, Part],
        options: CheckpointOptions | None,
    ) -> None:
        folder = Path(os.fspath(save_path)).absolute()
        manifest = done_by_first("Checkpoint.restore", lambda: load_manifest(folder))
        items = {name: manifest["objects"].get(name, {}).get("item") for name in parts}
        with_components = options is not None and options.restore_components
        wanted = [*items.values(), *([_COMPONENTS] if with_components else [])]

        def read() -> tuple[dict[str, dict[str, str]], dict[str, Arrays] | None]:
            _check_objects(parts, manifest["objects"], str(folder))
            found = {
                name: match(part, manifest["items"][items[name]], str(folder))
                for name, part in parts.items()
            }
            return found, load_arrays(folder, manifest, wanted) if is_first() else None

        found, own = done_by_all("Checkpoint.restore", read)
        arrays = shared_by_first(own, {name: manifest["items"][name] for name in wanted})
        for name, part in parts.items():
            components = {
                path.removeprefix(f"{items[name]}/"): array
                for path, array in arrays.get(_COMPONENTS, {}).items()
                if path.startswith(f"{items[name]}/")
            }
            give(part, found[name], arrays[items[name]], components)
            if part.source is not None:
                part.source.set_state(manifest["states"][name])
        tell_restored(manifest, str(folder))


def _check_kind(name: str, value: Any) -> None:
    try:
        part_of(name, value)
    except ValueError:  # not built yet, which it may be until it is saved
        return


def _item_names(parts: Mapping[str, Part]) -> dict[str, str]:
    """What Orbax calls each object's arrays."""
    models = [name for name, part in parts.items() if part.kind == "model"]
    first = models[0] if models else None
    return {name: _KERAS_ITEM if name == first else f"{name}_state" for name in parts}


def _check_objects(parts: Mapping[str, Part], saved: Mapping[str, Any], where: str) -> None:
    unknown = [name for name in parts if name not in saved]
    if unknown:
        raise ValueError(
            explain(
                f"{where} holds no {' and no '.join(unknown)}.",
                expected=f"its objects: {', '.join(sorted(saved))}.",
                fix="make the Checkpoint with the names with which it was saved, or without what "
                "is new.",
            )
        )
    for name, part in parts.items():
        kind = saved[name]["kind"]
        if (part.source is not None) != (kind == "state"):
            raise ValueError(
                explain(
                    f"{name} is a {part.kind} here and was saved in {where} as a {kind}.",
                    expected="an object like the one that was saved.",
                    fix="give the object another name, or restore another checkpoint.",
                )
            )
