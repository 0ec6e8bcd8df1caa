"""The checkpoints of an Estimator: what its folder holds, and what its variables have of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stratagem.checkpoint import Checkpoint, CheckpointManager, CheckpointOptions
from stratagem.checkpoint.group_calls import run_on_first
from stratagem.checkpoint.saving import load_arrays, load_manifest
from stratagem.estimator.steps.variable_store import VariableStore
from stratagem.messages import explain

__all__ = [
    "CHECKPOINT_NAME",
    "ModelCheckpoints",
    "latest_checkpoint",
    "read_names",
    "read_variable",
]

CHECKPOINT_NAME = "model.ckpt"
# TensorFlow's default, more than a year: none is kept for its age, and not the first one either.
_NEVER_HOURS = 10_000
# What the checkpoint calls the variables of a model function.
VARIABLES = "variables"


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the newest checkpoint in a folder of an Estimator. Call on every process.

    Args:
        folder: the `model_dir`.

    Returns:
        Its path; None where there is none.
    """
    manager = CheckpointManager(Checkpoint(), folder, None, checkpoint_name=CHECKPOINT_NAME)
    return manager.latest_checkpoint


class ModelCheckpoints:
    """Saves and restores the variables of one store.

    Args:
        store: the variables.
        folder: the `model_dir`.
        config: the `RunConfig`, which says what to keep.

    `is_initial` tells whether nothing was restored or trained.
    """

    def __init__(self, store: VariableStore, folder: str, config: Any) -> None:
        self._store = store
        self._folder = folder
        self._config = config
        self._values: tuple[str | None, int] = (None, 0)
        self.is_initial = True

    def save(self) -> str:
        """Saves all variables, unless they are as a checkpoint has them. Call on every process.

        Returns:
            The path.
        """
        path, count = self._values
        if path is not None and count == len(self._store.named) and self._is_of_series(path):
            return path
        hours = self._config.keep_checkpoint_every_n_hours
        manager = CheckpointManager(
            self._checkpoint(),
            self._folder,
            self._config.keep_checkpoint_max or None,
            keep_checkpoint_every_n_hours=hours if hours < _NEVER_HOURS else None,
            checkpoint_name=CHECKPOINT_NAME,
            step_counter=self._store.global_step,
        )
        with self._store.at_one_moment():
            path = manager.save(check_interval=False)
        assert path is not None
        self._values = (path, len(self._store.named))
        return path

    @property
    def latest(self) -> str | None:
        """The path of the newest checkpoint in the folder; None where there is none."""
        return latest_checkpoint(self._folder)

    def restore(self, path: str) -> None:
        """Gives all variables their values in a checkpoint, unless they have them.

        Call on every process.

        Args:
            path: of the checkpoint.
        """
        count = len(self._store.named)
        if self._values == (path, count):
            return
        # Of variables that all replicas have a part of each gets its own again.
        status = self._checkpoint().read(path, CheckpointOptions(restore_components=True))
        status.expect_partial()  # what evaluates has no optimizer
        self._values = (path, count)
        self.is_initial = False

    def forget(self) -> None:
        """Notes that the variables are about to change."""
        self._values = (None, 0)
        self.is_initial = False

    def _is_of_series(self, path: str) -> bool:
        """Whether a path is what the next save would write."""
        name = f"{CHECKPOINT_NAME}-{int(self._store.global_step)}"
        return Path(path).absolute() == (Path(self._folder) / name).absolute()

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(**{VARIABLES: self._store.named})


def read_names(path: str) -> list[str]:
    """Returns the names of the variables in a checkpoint, sorted. Call on every process.

    Args:
        path: of the checkpoint.
    """
    manifest = run_on_first("Estimator.get_variable_names", lambda: load_manifest(Path(path)))
    item = manifest["objects"][VARIABLES]["item"]
    return sorted(entry["path"] for entry in manifest["items"][item])


def read_values(path: str) -> dict[str, Any]:
    """Returns the values of all variables in a checkpoint, by name.

    Args:
        path: of the checkpoint.
    """
    manifest = load_manifest(Path(path))
    item = manifest["objects"][VARIABLES]["item"]
    return dict(load_arrays(Path(path), manifest, [item])[item])


def read_variable(path: str, name: str) -> Any:
    """Returns the value of a variable in a checkpoint.

    Args:
        path: of the checkpoint.
        name: of the variable, also as TensorFlow writes it, with ":0".

    Raises:
        ValueError: there is none of that name.
    """
    manifest = load_manifest(Path(path))
    item = manifest["objects"][VARIABLES]["item"]
    names = [entry["path"] for entry in manifest["items"][item]]
    wanted = name.removesuffix(":0")
    if wanted not in names:
        raise ValueError(
            explain(
                f"{path} holds no variable {name!r}.",
                expected=f"one of {sorted(names)}.",
                fix="correct the name; get_variable_names() returns them all.",
            )
        )
    return load_arrays(Path(path), manifest, [item])[item][wanted]
