"""Arrays of a checkpoint by name, without the objects that were saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.checkpoint.latest import newest_in
from stratagem.checkpoint.saving import load_arrays, load_manifest
from stratagem.errors import NotFoundError
from stratagem.messages import explain
from stratagem.storage import is_whole

__all__ = ["CheckpointReader", "list_variables", "load_checkpoint", "load_variable"]


class CheckpointReader:
    """Reads arrays of one checkpoint by the name of the object and the path in it.

    `load_checkpoint` makes it.

    Args:
        path: of the checkpoint.

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
        """Returns the shape of each array, by name."""
        return {name: list(entry["shape"]) for name, (_, entry) in self._entries.items()}

    def get_variable_to_dtype_map(self) -> dict[str, str]:
        """Returns the dtype of each array, by name."""
        return {name: str(entry["dtype"]) for name, (_, entry) in self._entries.items()}

    def has_tensor(self, tensor_str: str) -> bool:
        """Returns True if the checkpoint has an array of this name.

        Args:
            tensor_str: the name.
        """
        return tensor_str in self._entries

    def get_tensor(self, tensor_str: str) -> np.ndarray[Any, Any]:
        """Reads one array; the others stay on disk.

        Args:
            tensor_str: its name.

        Returns:
            The array, on the host.

        Raises:
            DataLossError: the checkpoint is damaged.
            NotFoundError: there is none of that name.
        """
        if tensor_str not in self._entries:
            raise NotFoundError(
                explain(
                    f"{self._folder} holds no array {tensor_str!r}.",
                    expected=f"one of {sorted(self._entries)}.",
                    fix="take a name that sg.train.list_variables(path) returns.",
                )
            )
        item, entry = self._entries[tensor_str]
        path = entry["path"]
        return load_arrays(self._folder, self._manifest, {item: [path]})[item][path]


def load_checkpoint(ckpt_dir_or_file: str | os.PathLike[str]) -> CheckpointReader:
    """Opens a checkpoint to read single arrays. This process has to see the folder.

    Args:
        ckpt_dir_or_file: path of a checkpoint, or a folder of some, of which the newest is taken.

    Returns:
        What reads it.

    Raises:
        NotFoundError: there is none.

    Source: TF 2.21 checkpoint_utils.py, load_checkpoint.
    """
    given = Path(os.fspath(ckpt_dir_or_file))
    newest = None if is_whole(given) else newest_in(given)
    return CheckpointReader(given if newest is None else given / newest)


def load_variable(ckpt_dir_or_file: str | os.PathLike[str], name: str) -> np.ndarray[Any, Any]:
    """Reads one array of a checkpoint. This process has to see the folder.

    Args:
        ckpt_dir_or_file: path of a checkpoint, or a folder of some, of which the newest is taken.
        name: of the array, such as "model/trainable_variables/dense/kernel".

    Returns:
        The array, on the host.

    Raises:
        NotFoundError: there is no checkpoint, or no array of that name in it.

    Source: TF 2.21 checkpoint_utils.py, load_variable.
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, list[int]]]:
    """Lists the arrays of a checkpoint. This process has to see the folder.

    Args:
        ckpt_dir_or_file: path of a checkpoint, or a folder of some, of which the newest is taken.

    Returns:
        Name and shape of each, by name.

    Raises:
        NotFoundError: there is none.

    Source: TF 2.21 checkpoint_utils.py, list_variables.
    """
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())
