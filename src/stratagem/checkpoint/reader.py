"""Readers for single arrays of a checkpoint, without the saved objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.checkpoint.latest import newest_in
from stratagem.checkpoint.saving import load_arrays, load_manifest
from stratagem.checkpoint.storage.files import is_whole
from stratagem.errors import NotFoundError, explain


class CheckpointReader:
    """Reads single arrays of a checkpoint, named by object and path. Created by `load_checkpoint`.

    Args:
        path: path of the checkpoint.

    Raises:
        NotFoundError: the checkpoint does not exist.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint = sg.train.Checkpoint(step=sg.Variable(7, dtype="int32"))
        ...     path = checkpoint.save(folder + "/ckpt")
        ...     reader = sg.train.load_checkpoint(folder)
        ...     print(reader.get_variable_to_shape_map(), reader.get_tensor("step/value"))
        {'step/value': [], 'save_counter/value': []} 7

    Source: TF 2.21 py_checkpoint_reader.py, CheckpointReader.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Path(os.fspath(path)).absolute()
        self._manifest = load_manifest(self._folder)
        self._entries = {
            f"{name}/{entry['path']}": (saved["item"], entry)
            for name, saved in self._manifest["objects"].items()
            for entry in self._manifest["items"][saved["item"]]
        }

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shape of each array by name."""
        return {name: list(entry["shape"]) for name, (_, entry) in self._entries.items()}

    def get_variable_to_dtype_map(self) -> dict[str, str]:
        """Returns the dtype of each array by name."""
        return {name: str(entry["dtype"]) for name, (_, entry) in self._entries.items()}

    def has_tensor(self, tensor_str: str) -> bool:
        """Returns True if the checkpoint has an array of this name.

        Args:
            tensor_str: name of the array.
        """
        return tensor_str in self._entries

    def get_tensor(self, tensor_str: str) -> np.ndarray[Any, Any]:
        """Reads one array; others are not read.

        Args:
            tensor_str: name of the array.

        Returns:
            The array, in host memory.

        Raises:
            DataLossError: the checkpoint is damaged.
            NotFoundError: no array has this name.
        """
        if tensor_str not in self._entries:
            raise NotFoundError(
                explain(
                    f"{self._folder} holds no array {tensor_str!r}.",
                    expected=f"one of {sorted(self._entries)}.",
                    fix="use a name that sg.train.list_variables(path) returns.",
                )
            )
        item, entry = self._entries[tensor_str]
        path = entry["path"]
        return load_arrays(self._folder, self._manifest, {item: [path]})[item][path]


def load_checkpoint(ckpt_dir_or_file: str | os.PathLike[str]) -> CheckpointReader:
    """Opens a checkpoint for reading single arrays. This process needs access to the folder.

    Args:
        ckpt_dir_or_file: path of a checkpoint, or of a folder, for its newest checkpoint.

    Returns:
        A reader.

    Raises:
        NotFoundError: there is no checkpoint.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint = sg.train.Checkpoint(step=sg.Variable(7, dtype="int32"))
        ...     path = checkpoint.save(folder + "/ckpt")
        ...     reader = sg.train.load_checkpoint(folder)  # or load_checkpoint(path)
        ...     print(reader.has_tensor("step/value"), reader.get_tensor("step/value"))
        True 7

    Source: TF 2.21 checkpoint_utils.py, load_checkpoint.
    """
    path = Path(os.fspath(ckpt_dir_or_file))
    newest = None if is_whole(path) else newest_in(path)
    return CheckpointReader(path if newest is None else path / newest)


def load_variable(ckpt_dir_or_file: str | os.PathLike[str], name: str) -> np.ndarray[Any, Any]:
    """Reads one array of a checkpoint. This process needs access to the folder.

    Args:
        ckpt_dir_or_file: path of a checkpoint, or of a folder, for its newest checkpoint.
        name: name of the array, such as "model/trainable_variables/dense/kernel".

    Returns:
        The array, in host memory.

    Raises:
        NotFoundError: there is no checkpoint, or no array of this name.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = sg.train.Checkpoint(weights=sg.Variable([1.0, 2.0])).save(folder + "/ckpt")
        ...     print(sg.train.load_variable(folder, "weights/value"))
        [1. 2.]

    Source: TF 2.21 checkpoint_utils.py, load_variable.
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, list[int]]]:
    """Lists the arrays of a checkpoint. This process needs access to the folder.

    Args:
        ckpt_dir_or_file: path of a checkpoint, or of a folder, for its newest checkpoint.

    Returns:
        Name and shape of each array, sorted by name.

    Raises:
        NotFoundError: there is no checkpoint.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = sg.train.Checkpoint(weights=sg.Variable([1.0, 2.0])).save(folder + "/ckpt")
        ...     print(sg.train.list_variables(folder))
        [('save_counter/value', []), ('weights/value', [2])]

    Source: TF 2.21 checkpoint_utils.py, list_variables.
    """
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())
