"""Checkpoints of an Estimator: saving, restoring and reading of variables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.group_calls import run_on_first
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.checkpoint.options import CheckpointOptions
from stratagem.checkpoint.saving import load_arrays, load_manifest
from stratagem.estimator.steps.variable_store import VariableStore
from stratagem.messages import explain

if TYPE_CHECKING:
    from stratagem.estimator.settings.run_config import RunConfig


CHECKPOINT_NAME = "model.ckpt"
# TensorFlow's default, more than a year. It disables keeping checkpoints by age.
_NEVER_HOURS = 10_000
# Name of the model function's variables in a checkpoint.
VARIABLES = "variables"


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the newest checkpoint in an Estimator's folder, or None. Call on every process."""
    manager = CheckpointManager(Checkpoint(), folder, None, checkpoint_name=CHECKPOINT_NAME)
    return manager.latest_checkpoint


class ModelCheckpoints:
    """Saves and restores a store's variables; `is_initial` until they are restored or trained."""

    def __init__(self, store: VariableStore, folder: str, config: RunConfig) -> None:
        self._store = store
        self._folder = folder
        self._config = config
        self._values: tuple[str | None, int] = (None, 0)
        self.is_initial = True

    def save(self) -> str:
        """Saves all variables unless a checkpoint has these values. Call on every process."""
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
        with self._store.consistent_reads():
            path = manager.save(check_interval=False)
        assert path is not None
        self._values = (path, len(self._store.named))
        return path

    @property
    def latest(self) -> str | None:
        """Path of the newest checkpoint in the folder, or None."""
        return latest_checkpoint(self._folder)

    def restore(self, path: str) -> None:
        """Restores all variables unless they already have these values. Call on every process."""
        count = len(self._store.named)
        if self._values == (path, count):
            return
        # Each replica gets its own component of an on-read variable back.
        status = self._checkpoint().read(path, CheckpointOptions(restore_components=True))
        status.expect_partial()  # evaluation has no optimizer
        self._values = (path, count)
        self.is_initial = False

    def forget(self) -> None:
        """Marks the variables as changed since the last checkpoint."""
        self._values = (None, 0)
        self.is_initial = False

    def _is_of_series(self, path: str) -> bool:
        """Returns True if the next save would write this path."""
        name = f"{CHECKPOINT_NAME}-{int(self._store.global_step)}"
        return Path(path).absolute() == (Path(self._folder) / name).absolute()

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(**{VARIABLES: self._store.named})


def read_names(path: str) -> list[str]:
    """Returns the sorted names of a checkpoint's variables. Call on every process."""
    manifest = run_on_first("Estimator.get_variable_names", lambda: load_manifest(Path(path)))
    item = manifest["objects"][VARIABLES]["item"]
    return sorted(entry["path"] for entry in manifest["items"][item])


def read_values(path: str) -> dict[str, Any]:
    """Returns the values of a checkpoint's variables by name."""
    manifest = load_manifest(Path(path))
    item = manifest["objects"][VARIABLES]["item"]
    return dict(load_arrays(Path(path), manifest, [item])[item])


def read_variable(path: str, name: str) -> Any:
    """Returns the value of one variable in a checkpoint."""
    manifest = load_manifest(Path(path))
    item = manifest["objects"][VARIABLES]["item"]
    names = [entry["path"] for entry in manifest["items"][item]]
    wanted = name.removesuffix(":0")
    if wanted not in names:
        raise ValueError(
            explain(
                f"{path} contains no variable named {name!r}.",
                expected=f"one of {sorted(names)}.",
                fix="correct the name; get_variable_names() lists all names.",
            )
        )
    return load_arrays(Path(path), manifest, [item])[item][wanted]
