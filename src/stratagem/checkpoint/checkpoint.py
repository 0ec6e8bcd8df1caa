"""Named objects, saved and restored together."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from stratagem.checkpoint.matching import match
from stratagem.checkpoint.objects import Part, part_of
from stratagem.checkpoint.storage import Arrays, read_arrays, read_manifest, write
from stratagem.checkpoint.together import done_by_all, done_by_first
from stratagem.messages import explain

__all__ = ["Checkpoint"]

# Where `keras.Model.load_weights` looks for a model's state.
_KERAS_ITEM = "pytree"
_COUNTER = "save_counter"


class Checkpoint:
    """Saves named objects together, and restores them under any strategy.

    Values are those that all replicas' copies stand for: what is saved under one strategy, or none,
    is restored under any other, on any number of devices of one process. The folder is one of
    Orbax's; Keras from 3.14 on reads the first model's weights from it with
    `model.load_weights(path)`.

    Args:
        root: one object; it is saved under the name "root".
        **kwargs: objects by name: Keras models, layers, optimizers, metrics, seed generators and
            variables, and what has `get_state()` and `set_state()`, such as an iterator of a
            distributed dataset.

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

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Saves under a name with a number, which counts up.

        Args:
            file_prefix: folder and beginning of the name, such as "runs/ckpt".

        Returns:
            The path, such as "runs/ckpt-1".

        Raises:
            OSError: it could not be written; what was there before still is.
            ValueError: an object has no variables yet.
        """
        return self.save_as(f"{os.fspath(file_prefix)}-{int(self.save_counter) + 1}")

    def save_as(self, path: str | os.PathLike[str]) -> str:
        """Saves under a name as it is, and counts it.

        Args:
            path: where; nothing may be there.

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
            return self.write(path)
        except Exception:
            self.save_counter.assign(before)
            raise

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Saves under a name as it is.

        Args:
            file_prefix: the path; nothing may be there.

        Returns:
            The path.

        Raises:
            OSError: it could not be written; what was there before still is.
            ValueError: an object has no variables yet.
        """
        folder = Path(os.fspath(file_prefix)).absolute()
        parts = self._parts()
        # Reading what has a component on each replica takes all processes.
        arrays = {name: _values(part) for name, part in parts.items()}
        states = {name: _state(part) for name, part in parts.items() if part.source}
        items = _item_names(parts)
        notes = {
            "objects": {name: {"kind": p.kind, "item": items[name]} for name, p in parts.items()},
            "states": states,
        }
        done_by_first(
            "Checkpoint.write",
            lambda: write(folder, {items[name]: arrays[name] for name in parts}, notes),
        )
        return os.fspath(file_prefix)

    def restore(self, save_path: str | os.PathLike[str]) -> None:
        """Gives all objects, and the counter of saves, the state of a checkpoint.

        Nothing is changed if anything does not fit.

        Args:
            save_path: what `save` returned.

        Raises:
            DataLossError: the checkpoint is damaged.
            NotFoundError: there is none.
            ValueError: the checkpoint is of other objects, or shapes differ.
        """
        self._read(save_path, self._parts())

    def read(self, save_path: str | os.PathLike[str]) -> None:
        """Gives all objects the state of a checkpoint, and leaves the counter of saves.

        Args:
            save_path: what `write` or `save` returned.

        Raises:
            DataLossError: the checkpoint is damaged.
            NotFoundError: there is none.
            ValueError: the checkpoint is of other objects, or shapes differ.
        """
        parts = self._parts()
        del parts[_COUNTER]
        self._read(save_path, parts)

    def _parts(self) -> dict[str, Part]:
        named = {**self._objects, _COUNTER: self.save_counter}
        return {name: part_of(name, value) for name, value in named.items()}

    def _read(self, save_path: str | os.PathLike[str], parts: Mapping[str, Part]) -> None:
        folder = Path(os.fspath(save_path)).absolute()

        def read() -> tuple[dict[str, Arrays], dict[str, dict[str, str]], dict[str, Any]]:
            manifest = read_manifest(folder)
            _check_objects(parts, manifest["objects"], str(folder))
            items = {name: manifest["objects"][name]["item"] for name in parts}
            found = {
                name: match(part, manifest["items"][items[name]], str(folder))
                for name, part in parts.items()
            }
            arrays = read_arrays(folder, manifest, list(items.values()))
            return {name: arrays[items[name]] for name in parts}, found, manifest["states"]

        arrays, found, states = done_by_all("Checkpoint.restore", read)
        for name, part in parts.items():
            for path, saved_path in found[name].items():
                part.variables[path].assign(arrays[name][saved_path])
            if part.source is not None:
                part.source.set_state(states[name])


def _check_kind(name: str, value: Any) -> None:
    try:
        part_of(name, value)
    except ValueError:  # not built yet, which it may be until it is saved
        return


def _state(part: Part) -> Any:
    assert part.source is not None
    state = part.source.get_state()
    try:
        json.dumps(state)
    except TypeError as error:
        raise TypeError(
            explain(
                f"{part.name}.get_state() returned what JSON cannot hold: {error}",
                expected="numbers, texts, truth values, None, and lists and dicts of them.",
                fix="wrap it in an object whose get_state() and set_state() convert it.",
            )
        ) from error
    return state


def _values(part: Part) -> dict[str, np.ndarray[Any, Any]]:
    return {path: np.asarray(_whole(variable)) for path, variable in part.variables.items()}


def _whole(variable: Any) -> Any:
    """The value in the variable's own dtype, also where Keras casts what layers read."""
    own = getattr(variable, "own_value", None)
    return variable.value if own is None else own()


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
