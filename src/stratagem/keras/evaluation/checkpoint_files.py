"""Keras checkpoint files: search in a folder, and loading into a model.

Keras writes in place: a file appears before it is complete, and may be rewritten while it is read.
HDF5 also locks files that it reads, which would block training. Hence a file is copied first, and
loaded only if it did not change meanwhile.
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
from typing import TYPE_CHECKING, Protocol

from stratagem.messages import explain

if TYPE_CHECKING:
    import keras


# ".weights.h5" comes first because it also ends with ".h5".
_SUFFIXES = (".weights.h5", ".keras", ".h5")
# A separate integer, not the decimals of a number: "ckpt-0007", "07-0.35".
_EPOCH = re.compile(r"(?:^|[-_=]|(?<!\d)\.|epoch|ckpt)(\d+)(?=[-_]|$)")
# Errors of h5py and zipfile for an incomplete file.
_NOT_WHOLE = (OSError, EOFError, KeyError, zipfile.BadZipFile)


class UnreadableCheckpointError(Exception):
    """Raised for an incomplete checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """State of a checkpoint file; a rewritten file is another checkpoint.

    Example:
        >>> from stratagem.keras.evaluation.checkpoint_files import CheckpointFile
        >>> CheckpointFile(path=Path("ckpt-0007.weights.h5"), modified_ns=0, size_bytes=0).epoch
        7
    """

    path: Path
    modified_ns: int
    size_bytes: int

    @property
    def name(self) -> str:
        """File name."""
        return self.path.name

    @property
    def epoch(self) -> int | None:
        """Last separate integer in the name; None if there is none."""
        ends = (end for end in _SUFFIXES if self.name.endswith(end))
        stem = self.name.removesuffix(next(ends, ""))
        numbers = _EPOCH.findall(stem)
        return int(numbers[-1]) if numbers else None

    @property
    def age(self) -> tuple[int, list[str | int]]:
        """Sort key: time, then the name with numbers by value."""
        parts = re.split(r"(\d+)", self.name)
        # Text and digits alternate, so that values of the same type are compared.
        return self.modified_ns, [
            int(part) if index % 2 else part for index, part in enumerate(parts)
        ]


class CheckpointFormat(Protocol):
    """Finds and loads checkpoints of one format."""

    @property
    def names(self) -> str:
        """File name pattern, for messages."""
        ...

    def find(self, folder: Path) -> Sequence[CheckpointFile]:
        """Returns checkpoints, complete or not, oldest first; none if `folder` is missing."""
        ...

    def load(self, checkpoint: CheckpointFile, model: keras.Model) -> None:
        """Loads weights into a built model, and matching state into its optimizer.

        Raises:
            FileNotFoundError: the file was removed.
            UnreadableCheckpointError: the file is incomplete, or was rewritten.
            ValueError: it does not fit the model.
        """
        ...


@dataclasses.dataclass(frozen=True)
class KerasFiles:
    """Files written by `ModelCheckpoint`, `save_weights` and `save`."""

    names: str = " or ".join(f"*{suffix}" for suffix in _SUFFIXES[:2])

    def find(self, folder: Path) -> list[CheckpointFile]:
        """Returns the files with a checkpoint's suffix, oldest first."""
        found: list[CheckpointFile] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    # Some programs put hidden files of the same name, after a dot, beside others.
                    is_hidden = entry.name.startswith(".")
                    if entry.name.endswith(_SUFFIXES) and not is_hidden and entry.is_file():
                        with contextlib.suppress(FileNotFoundError):
                            found.append(_checkpoint(folder / entry.name))
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda one: one.age)

    def load(self, checkpoint: CheckpointFile, model: keras.Model) -> None:
        """Loads a file; see `CheckpointFormat.load`."""
        with tempfile.TemporaryDirectory(prefix="stratagem-") as folder:
            copy = Path(folder, checkpoint.name)
            try:
                shutil.copyfile(checkpoint.path, copy)
                if _checkpoint(checkpoint.path) != checkpoint:
                    raise UnreadableCheckpointError("it was written again while it was read")
                with warnings.catch_warnings():
                    # Evaluation needs no optimizer state, so the optimizer may differ.
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
                        expected="weights of the evaluated model.",
                        fix="build the model as in training, or pass the folder of its "
                        "checkpoints.",
                        code="SG703",
                    )
                ) from error


def _checkpoint(path: Path) -> CheckpointFile:
    status = path.stat()
    return CheckpointFile(path=path, modified_ns=status.st_mtime_ns, size_bytes=status.st_size)
