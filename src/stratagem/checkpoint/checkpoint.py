"""Named objects, saved and restored together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from stratagem.background_errors import raise_reported
from stratagem.checkpoint.load_status import LoadStatus
from stratagem.checkpoint.objects import Part, part_of, state_of
from stratagem.checkpoint.options import CheckpointOptions
from stratagem.checkpoint.restoration import COMPONENTS, Restoration
from stratagem.checkpoint.saving import Place, load_manifest, save, wait_for_writing
from stratagem.checkpoint.together import done_by_first
from stratagem.checkpoint.told_saves import step_of_run, tell_restored
from stratagem.checkpoint.values import components_of, values_of
from stratagem.messages import explain

__all__ = ["Checkpoint"]

# Where `keras.Model.load_weights` looks for a model's state.
_KERAS_ITEM = "pytree"
_COUNTER = "save_counter"


class Checkpoint:
    """Saves named objects together, and restores them under any strategy.

    Values are those that all replicas' copies stand for: what is saved under one strategy, or none,
    is restored under any other, on any number of devices and processes. The folder is one of
    Orbax's; Keras from 3.14 on reads the first model's weights from it with
    `model.load_weights(path)`.

    Args:
        root: one object; it is saved under the name "root".
        **kwargs: objects by name: Keras models, layers, optimizers, metrics, seed generators and
            variables, dicts from names to variables, pytrees of arrays, and what has `get_state()`
            and `set_state()`, such as an iterator of a distributed dataset. They are attributes.

    Raises:
        TypeError: an object of another kind.

    Example:
        >>> import tempfile
        >>> with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     step = sg.Variable(7, dtype="int32")
        >>> plain = keras.Variable(0, dtype="int32")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = sg.train.Checkpoint(step=step).save(folder + "/ckpt")
        ...     _ = sg.train.Checkpoint(step=plain).restore(path).assert_consumed()
        >>> int(plain.value)
        7

    Source: TF 2.21 checkpoint.py, Checkpoint.
    """

    def __init__(self, root: Any = None, **kwargs: Any) -> None:
        self._restoration: Restoration | None = None
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
    ) -> LoadStatus:
        """Gives all objects, and the counter of saves, the state of a checkpoint.

        Objects whose variables are not there yet get their values when they are built: by a call, a
        step, `fit` or `build`. So do those that are set as attributes later. A pytree is not
        changed: the restored one is the attribute of its name. Nothing is changed if anything does
        not fit. Call on every process; process 0 reads.

        Args:
            save_path: what `save` returned.
            options: how it is read.

        Returns:
            What tells whether all has been restored.

        Raises:
            DataLossError: the checkpoint is damaged.
            NotFoundError: there is none.
            ValueError: the checkpoint is of other objects, or shapes differ; what is built later
                raises it then.
        """
        return self._read(save_path, options, with_counter=True)

    def read(
        self, save_path: str | os.PathLike[str], options: CheckpointOptions | None = None
    ) -> LoadStatus:
        """Gives all objects the state of a checkpoint, as `restore`, but not the counter of saves.

        Args:
            save_path: what `write` or `save` returned.
            options: how it is read.

        Returns:
            What tells whether all has been restored.

        Raises:
            DataLossError: the checkpoint is damaged.
            NotFoundError: there is none.
            ValueError: as `restore`.
        """
        return self._read(save_path, options, with_counter=False)

    def hold(self) -> None:
        """Reads what objects wait for now, and keeps it on the host. Call on every process.

        Raises:
            DataLossError: the checkpoint is damaged.
        """
        if self._restoration is not None:
            self._restoration.hold()

    def attach(self, name: str, value: Any) -> None:
        """Saves another object, too, under a name; gives it what a restore has left for that name.

        `checkpoint.name = value` does the same.

        Args:
            name: of the object; one that has it is replaced.
            value: as in the constructor.

        Raises:
            TypeError: an object of another kind.
            ValueError: what was restored does not fit.
        """
        _check_kind(name, value)
        self._objects[name] = value
        if self._restoration is not None and self._restoration.wants(name):
            self._restoration.restore({name: value})

    def detach(self, name: str) -> None:
        """Saves the object of a name no longer, if there is one.

        Args:
            name: of the object.
        """
        self._objects.pop(name, None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == _COUNTER or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            self.attach(name, value)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._objects:
            return self._objects[name]
        raise AttributeError(
            explain(
                f"Checkpoint has no {name!r}.",
                expected="a method, or the name of an object that it saves.",
                fix=f"pass {name}=... when it is made, or set checkpoint.{name} = ...",
            )
        )

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
        arrays[COMPONENTS] = {
            f"{items[name]}/{path}": components
            for name, part in parts.items()
            for path, components in components_of(part).items()
        }
        notes = {
            "objects": {name: _noted(part, items[name]) for name, part in parts.items()},
            "states": {name: state_of(part) for name, part in parts.items() if part.source},
            **step_of_run(),
        }
        folder = Path(os.fspath(path)).absolute()
        written = save(arrays, notes, place or Place(folder), options or CheckpointOptions())
        return os.fspath(path) if written == folder else str(written)

    def _read(
        self,
        save_path: str | os.PathLike[str],
        options: CheckpointOptions | None,
        *,
        with_counter: bool,
    ) -> LoadStatus:
        folder = Path(os.fspath(save_path)).absolute()
        manifest = done_by_first("Checkpoint.restore", lambda: load_manifest(folder))
        restoration = Restoration(
            folder,
            manifest,
            with_components=options is not None and options.restore_components,
            ignored=frozenset() if with_counter else frozenset({_COUNTER}),
            replace=self._objects.__setitem__,
        )
        counted = {_COUNTER: self.save_counter} if with_counter else {}
        try:
            restoration.restore(self._objects | counted)
        except Exception:
            restoration.end()
            raise
        if self._restoration is not None:
            self._restoration.end()
        self._restoration = restoration
        tell_restored(manifest, str(folder))
        return LoadStatus(restoration.consumption)


def _check_kind(name: str, value: Any) -> None:
    try:
        part_of(name, value)
    except ValueError:  # not built yet, which it may be until it is saved
        return


def _noted(part: Part, item: str) -> dict[str, Any]:
    noted: dict[str, Any] = {"kind": part.kind, "item": item}
    if part.tree is not None:
        noted["leaves"] = {
            path: {"described": leaf.described, "sharding": leaf.sharding}
            for path, leaf in part.tree.leaves.items()
        }
    return noted


def _item_names(parts: Mapping[str, Part]) -> dict[str, str]:
    """What Orbax calls each object's arrays."""
    models = [name for name, part in parts.items() if part.kind == "model"]
    first = models[0] if models else None
    return {name: _KERAS_ITEM if name == first else f"{name}_state" for name in parts}
