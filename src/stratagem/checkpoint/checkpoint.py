"""Saving and restoring named objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from stratagem.checkpoint.latest import is_first, run_on_first
from stratagem.checkpoint.objects import LoadStatus, Part, part_of, state_of
from stratagem.checkpoint.restoration import (
    COMPONENTS,
    Restoration,
    begin_sharded_write,
    bytes_to_write,
    own_shards,
)
from stratagem.checkpoint.restoring import gathered_components_of, on_host, whole_values_of
from stratagem.checkpoint.saving import (
    CheckpointLocation,
    CheckpointOptions,
    SavedTables,
    load_manifest,
    prepare,
    record_restore,
    save,
    save_tables,
    step_of_run,
    wait_for_writing,
)
from stratagem.checkpoint.storage.files import Arrays
from stratagem.checkpoint.storage.shards import ShardedItems, remove_shards, shards_item
from stratagem.errors import explain, invalid, raise_reported

# Values of all objects of a checkpoint, as they are when a save is called.


def values_to_save(
    parts: Mapping[str, Part],
    items: Mapping[str, str],
    sharded: ShardedItems,
) -> dict[str, Arrays]:
    """Returns arrays by item and path; `items` names each object's. Call on every process.

    `sharded` has the arrays whose shards this process returns; other processes than the first
    return nothing else.
    """
    arrays = _whole(parts, items, on_host if is_first() else lambda value: None, sharded)
    shards = _shards(parts, items, sharded)
    arrays = arrays | shards if is_first() else shards
    return {
        item: {path: on_host(value) for path, value in of.items()} for item, of in arrays.items()
    }


def _shards(
    parts: Mapping[str, Part], items: Mapping[str, str], sharded: ShardedItems
) -> dict[str, dict[str, Any]]:
    """Returns the shards that this process writes, by the names that storage expects."""
    return {
        shards_item(items[name]): {
            key: shard
            for path, array in sharded[items[name]].items()
            if array is not None
            for key, shard in own_shards(path, part.variables[path].stored)
        }
        for name, part in parts.items()
        if items[name] in sharded
    }


def _whole(
    parts: Mapping[str, Part],
    items: Mapping[str, str],
    keep: Callable[[Any], Any],
    sharded: ShardedItems,
) -> dict[str, dict[str, Any]]:
    """Returns whole values; `keep` gets each that was gathered from several processes."""
    arrays = {}
    for name, part in parts.items():
        saved = sharded.get(items[name], {})
        skipped = {path for path, array in saved.items() if array is not None}
        arrays[items[name]] = whole_values_of(part, keep, skipped)
    arrays[COMPONENTS] = {
        f"{items[name]}/{path}": components
        for name, part in parts.items()
        for path, components in gathered_components_of(part, keep).items()
    }
    return arrays


# `keras.Model.load_weights` looks for a model's state here.
_KERAS_ITEM = "pytree"
_COUNTER = "save_counter"


class Checkpoint:
    """Saves named objects together and restores them under any strategy.

    Saves the logical value of each variable, not its copies: a checkpoint saved under one strategy,
    or none, restores under any other, on any number of devices and processes. The folder is in
    Orbax's format. Keras 3.14 and later read the first model's weights from it with
    `model.load_weights(path)`.

    Args:
        root: one object, saved under the name "root".
        **kwargs: objects by name: Keras models, layers, optimizers, metrics, seed generators and
            variables, dicts from names to variables, pytrees of arrays, and objects with
            `get_state()` and `set_state()`, such as iterators of distributed datasets. Each is
            available as an attribute.

    Raises:
        TypeError: an object of another kind.
        ValueError: an object is named "save_counter".

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

    def __init__(self, root: object = None, **kwargs: object) -> None:
        self._restoration: Restoration | None = None
        self._objects: dict[str, Any] = ({} if root is None else {"root": root}) | kwargs
        if _COUNTER in kwargs:
            raise invalid(
                f"Checkpoint received an object named {_COUNTER}.",
                expected="another name: the checkpoint counts its saves under this one.",
                fix="rename the object.",
            )
        for name, value in self._objects.items():
            _check_kind(name, value)
        self.save_counter = keras.Variable(0, dtype="int32", trainable=False, name=_COUNTER)

    def save(
        self, file_prefix: str | os.PathLike[str], options: CheckpointOptions | None = None
    ) -> str:
        """Saves under a numbered name, counting up. Call on every process.

        Args:
            file_prefix: folder and start of the name, such as "runs/ckpt".
            options: how to write; None for the defaults.

        Returns:
            The path, such as "runs/ckpt-1". Every process returns the path of process 0, which
            writes all but the shards of other processes.

        Raises:
            OSError: writing failed; earlier checkpoints are unchanged.
            TypeError: the state of an object cannot be stored as JSON.
            ValueError: an object has no variables yet.
        """
        return self.save_as(f"{os.fspath(file_prefix)}-{int(self.save_counter) + 1}", options)

    def save_as(
        self,
        path: str | os.PathLike[str],
        options: CheckpointOptions | None = None,
        *,
        place: CheckpointLocation | None = None,
    ) -> str:
        """Saves under exactly this name and increments the save counter. Call on every process.

        Args:
            path: path of the checkpoint; must not exist.
            options: how to write; None for the defaults.
            place: prepares the folder and post-processes it, on process 0.

        Returns:
            The path.

        Raises:
            OSError: writing failed; earlier checkpoints are unchanged.
            TypeError: the state of an object cannot be stored as JSON.
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
        """Saves under exactly this name, without counting. Call on every process.

        Args:
            file_prefix: path of the checkpoint; must not exist.
            options: how to write; None for the defaults.

        Returns:
            The path.

        Raises:
            OSError: writing failed; earlier checkpoints are unchanged.
            TypeError: the state of an object cannot be stored as JSON.
            ValueError: an object has no variables yet.
        """
        return self._write(file_prefix, options, None)

    def sync(self) -> None:
        """Waits for asynchronous writes to finish. Call on every process.

        Raises:
            OSError: a write failed, and no step has raised its error yet.
        """
        run_on_first("Checkpoint.sync", wait_for_writing)

    def prepare(self) -> None:
        """Starts what asynchronous saves need, so that the first one is as fast as later ones.

        That is the process that writes, and memory for a copy of the values. Both are made ready in
        the background. `BackupAndRestore` with `enable_async` calls it. Call on every process.

        Raises:
            ValueError: an object has no variables yet.

        Example:
            >>> import tempfile
            >>> checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
            >>> checkpoint.prepare()  # before training
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = checkpoint.save(
            ...         folder + "/ckpt", options=sg.train.CheckpointOptions(enable_async=True)
            ...     )
            ...     checkpoint.sync()
        """
        parts = self.parts()
        size_bytes = sum(map(bytes_to_write, parts.values()))
        if size_bytes or is_first():
            prepare(size_bytes)

    def restore(
        self, save_path: str | os.PathLike[str], options: CheckpointOptions | None = None
    ) -> LoadStatus:
        """Restores all objects and the save counter from a checkpoint. Call on every process.

        Objects without variables get their values when they are built: by a call, a step, `fit` or
        `build`. The same holds for objects set as attributes later. Pytrees are not modified: the
        restored pytree replaces the attribute of its name. If anything does not match, nothing
        changes. Each process that finds the folder reads the shards of its devices; process 0 reads
        the rest.

        Args:
            save_path: path that `save` returned.
            options: how to read; None for the defaults.

        Returns:
            Status of the restore. `assert_consumed()` checks that it is complete, and
            `assert_existing_objects_matched()` that all objects have their values;
            `expect_partial()` says that values may be left over.

        Raises:
            DataLossError: the checkpoint is damaged.
            NotFoundError: the checkpoint does not exist.
            ValueError: the checkpoint holds other objects, or shapes differ. For objects that are
                built later, building raises it.
        """
        return self._read(save_path, options, with_counter=True)

    def read(
        self, save_path: str | os.PathLike[str], options: CheckpointOptions | None = None
    ) -> LoadStatus:
        """Restores all objects from a checkpoint, but not the save counter. Call on every process.

        Args:
            save_path: path that `write` or `save` returned.
            options: how to read; None for the defaults.

        Returns:
            Status of the restore, as from `restore`.

        Raises:
            DataLossError: the checkpoint is damaged.
            NotFoundError: the checkpoint does not exist.
            ValueError: as in `restore`.
        """
        return self._read(save_path, options, with_counter=False)

    def hold(self) -> None:
        """Loads pending values, so that the files may disappear. Call on every process.

        Raises:
            DataLossError: the checkpoint is damaged.
        """
        if self._restoration is not None:
            self._restoration.hold()

    def attach(self, name: str, value: object) -> None:
        """Adds an object under a name and restores pending values for that name.

        `checkpoint.name = value` does the same.

        Args:
            name: name of the object; replaces an object of the same name.
            value: as in the constructor.

        Raises:
            TypeError: an object of another kind.
            ValueError: the restored values do not match the object.
        """
        _check_kind(name, value)
        self._objects[name] = value
        if self._restoration is not None and self._restoration.wants(name):
            self._restoration.restore({name: value})

    def detach(self, name: str) -> None:
        """Removes an object, if it exists.

        Args:
            name: name of the object.
        """
        self._objects.pop(name, None)

    def __setattr__(self, name: str, value: object) -> None:
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
                fix=f"pass {name}=... to the constructor, or set checkpoint.{name} = ...",
            )
        )

    def parts(self) -> dict[str, Part]:
        """Returns the variables and state of all objects and of the save counter.

        Raises:
            ValueError: an object has no variables yet.
        """
        named = {**self._objects, _COUNTER: self.save_counter}
        return {name: part_of(name, value) for name, value in named.items()}

    def _write(
        self,
        path: str | os.PathLike[str],
        options: CheckpointOptions | None,
        place: CheckpointLocation | None,
    ) -> str:
        raise_reported()
        parts = self.parts()
        options = options or CheckpointOptions()
        items = _item_names(parts)
        folder = Path(os.fspath(path)).absolute()
        sharded = begin_sharded_write(folder if place is None else place.folder, parts, items)
        tables: SavedTables | None = None
        try:
            arrays = values_to_save(parts, items, {} if sharded is None else sharded.arrays)
            tables = save_tables(parts, folder, None if place is None else place.tables)
            notes = _notes(parts, items, tables)
            staged = None if tables is None else tables.staged
            place = place or CheckpointLocation(folder)
            written = save(arrays, notes, place, options, sharded, staged)
        except Exception:
            if tables is not None:
                tables.remove()
            if sharded is not None and is_first():
                remove_shards(sharded)
            raise
        return os.fspath(path) if written == folder else str(written)

    def _read(
        self,
        save_path: str | os.PathLike[str],
        options: CheckpointOptions | None,
        *,
        with_counter: bool,
    ) -> LoadStatus:
        folder = Path(os.fspath(save_path)).absolute()
        manifest = run_on_first("Checkpoint.restore", lambda: load_manifest(folder))
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
        record_restore(manifest, str(folder))
        return LoadStatus(restoration.consumption)


def _check_kind(name: str, value: object) -> None:
    try:
        part_of(name, value)
    except ValueError:  # not built yet; it only has to be built before it is saved
        return


def _notes(
    parts: Mapping[str, Part], items: Mapping[str, str], tables: SavedTables | None
) -> dict[str, Any]:
    """Returns the JSON content of a checkpoint beside its arrays."""
    return {
        "objects": {name: _object_metadata(part, items[name]) for name, part in parts.items()},
        "states": {name: state_of(part) for name, part in parts.items() if part.source},
        **({} if tables is None else {"tables": tables.notes}),
        **step_of_run(),
    }


def _object_metadata(part: Part, item: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"kind": part.kind, "item": item}
    if part.tree is not None:
        metadata["leaves"] = {
            path: {"described": leaf.described, "sharding": leaf.sharding}
            for path, leaf in part.tree.leaves.items()
        }
    return metadata


def _item_names(parts: Mapping[str, Part]) -> dict[str, str]:
    """Returns the name of each object's arrays in the Orbax folder."""
    models = [name for name, part in parts.items() if part.kind == "model"]
    first = models[0] if models else None
    return {name: _KERAS_ITEM if name == first else f"{name}_state" for name in parts}
