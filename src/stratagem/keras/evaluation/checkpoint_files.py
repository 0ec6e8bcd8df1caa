"""Checkpoints of Keras in a folder: finding them, and loading one into a model.

Keras writes in place: a file appears before it is whole, and may be written again while it is read.
HDF5 also locks a file that it reads, and whoever trains could not write it at that time. So a file
is copied first, and read only if it did not change meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from stratagem.messages import explain

__all__ = ["Checkpoint", "CheckpointFormat", "KerasFiles", "UnreadableCheckpointError"]

# ".weights.h5" before ".h5", which it ends with too.
_SUFFIXES = (".weights.h5", ".keras", ".h5")
# A whole number by itself, and not behind the point of a decimal one: "ckpt-0007", "07-0.35".
_EPOCH = re.compile(r"(?:^|[-_=]|(?<!\d)\.|epoch|ckpt)(\d+)(?=[-_]|$)")
# What h5py and zipfile raise for a file that is not whole.
_NOT_WHOLE = (OSError, EOFError, KeyError, zipfile.BadZipFile)


class UnreadableCheckpointError(Exception):
    """Raised for a checkpoint that is not whole, or not yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One state of one file of a folder; written again, it is another checkpoint.

    Args:
        path: the file.
        modified_ns: when it was last written.
        size_bytes: how long it is.

    Example:
        >>> from stratagem.keras.evaluation.checkpoint_files import Checkpoint
        >>> Checkpoint(path=Path("ckpt-0007.weights.h5"), modified_ns=0, size_bytes=0).epoch
        7
    """

    path: Path
    modified_ns: int
    size_bytes: int

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def epoch(self) -> int | None:
        """The last number that stands by itself in the name; None if there is none."""
        ends = (end for end in _SUFFIXES if self.name.endswith(end))
        stem = self.name.removesuffix(next(ends, ""))
        numbers = _EPOCH.findall(stem)
        return int(numbers[-1]) if numbers else None

    @property
    def age(self) -> tuple[int, list[str | int]]:
        """Sort key of checkpoints: time, then the name, with 10 after 9."""
        parts = re.split(r"(\d+)", self.name)
        # Text and digits take turns, so that like is compared with like.
        return self.modified_ns, [
            int(part) if index % 2 else part for index, part in enumerate(parts)
        ]


class CheckpointFormat(Protocol):
    """One kind of checkpoint."""

    @property
    def names(self) -> str:
        """Name of its checkpoints, for messages."""
        ...

    def find(self, folder: Path) -> Sequence[Checkpoint]:
        """Returns what is there, finished or not.

        Args:
            folder: where; it need not exist.

        Returns:
            The checkpoints, the oldest first.
        """
        ...

    def load(self, checkpoint: Checkpoint, model: Any) -> None:
        """Gives a model the weights of a checkpoint, and its optimizer the state that fits it.

        Args:
            checkpoint: of those found.
            model: a model that is built.

        Raises:
            FileNotFoundError: it has gone.
            UnreadableCheckpointError: it is not whole, or was written again.
            ValueError: it does not fit the model.
        """
        ...


@dataclasses.dataclass(frozen=True)
class KerasFiles:
    """Files that `ModelCheckpoint`, `save_weights` and `save` write."""

    names: str = " or ".join(f"*{suffix}" for suffix in _SUFFIXES[:2])

    def find(self, folder: Path) -> list[Checkpoint]:
        """Returns the files of a folder that are called like checkpoints, the oldest first."""
        found: list[Checkpoint] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    # Some programs put files beside others under the same name behind a dot.
                    is_hidden = entry.name.startswith(".")
                    if entry.name.endswith(_SUFFIXES) and not is_hidden and entry.is_file():
                        with contextlib.suppress(FileNotFoundError):
                            found.append(_checkpoint(folder / entry.name))
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda one: one.age)

    def load(self, checkpoint: Checkpoint, model: Any) -> None:
        """Loads one of these files; see `CheckpointFormat.load`."""
        with tempfile.TemporaryDirectory(prefix="stratagem-") as folder:
            copy = Path(folder, checkpoint.name)
            try:
                shutil.copyfile(checkpoint.path, copy)
                if _checkpoint(checkpoint.path) != checkpoint:
                    raise UnreadableCheckpointError("it was written again while it was read")
                with warnings.catch_warnings():
                    # Evaluation needs no optimizer: it may be another one.
                    warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
                    model.load_weights(copy)
            except FileNotFoundError:
                raise
            except _NOT_WHOLE as error:
                raise UnreadableCheckpointError(f"{type(error).__name__}: {error}") from error
            except ValueError as error:
                raise ValueError(
                    explain(
                        f"{checkpoint.path} does not fit the model: {error}",
                        expected="the weights of the model that is evaluated.",
                        fix="build the model as in training, or name the folder of its "
                        "checkpoints.",
                    )
                ) from error


def _checkpoint(path: Path) -> Checkpoint:
    status = path.stat()
    return Checkpoint(path=path, modified_ns=status.st_mtime_ns, size_bytes=status.st_size)
