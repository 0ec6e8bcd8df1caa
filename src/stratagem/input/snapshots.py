"""Snapshots: the batches of a dataset in record files, read in place through memory maps.

A folder has files of batches, and a manifest, which is written last: the place of each batch, in
the order of the dataset. A folder without a manifest is a snapshot that is not finished.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.errors import DataLossError, NotFoundError, explain
from stratagem.group.transport.journal import HEADER_BYTES, frames_in, record_at
from stratagem.group.transport.wire import Message, unpack
from stratagem.input.batch_messages import unpack_batch
from stratagem.input.sources.sequences import SequenceSource

HEAD = b"stratagem snapshot 1\n"
MANIFEST = "manifest"


class RecordFile:
    """A file of a snapshot, mapped into memory: a line that names the format, then records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.size_bytes = os.fstat(file.fileno()).st_size
            has_data = self.size_bytes >= len(HEAD)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if has_data else None
        self.is_valid = self._map is not None and self._map[: len(HEAD)] == HEAD

    def part(self, begin: int, end: int) -> memoryview:
        """Returns a byte range of the file."""
        return memoryview(b"" if self._map is None else self._map)[begin:end]

    def record_at(self, place: int) -> int | None:
        """Returns the end of the intact record at an offset, or None."""
        found = record_at(self.part, place, self.size_bytes)
        return None if found is None else found[1]

    def message(self, place: int, end: int) -> Message:
        """Returns the message of an intact record; its arrays are views of the file."""
        return unpack(frames_in(self.part(place + HEADER_BYTES, end)))


class SnapshotBatches(Sequence[Any]):
    """The batches of a finished snapshot. Their arrays are read-only views of its files.

    The checksum of a batch is verified when a process reads it for the first time.

    Args:
        folder: path of the snapshot.

    Raises:
        DataLossError: it is damaged or not finished.
        NotFoundError: there is none.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        manifest = self._manifest()
        # File number, and where the record begins and ends.
        self._places = np.array(manifest.arrays[0])
        names: list[str] = manifest.fields["files"]
        self._files: list[RecordFile] = []
        for number, name in enumerate(names):
            try:
                file = RecordFile(self._folder / name)
            except FileNotFoundError as error:
                raise _damaged(self._folder, f"the file {name} is missing") from error
            own = self._places[self._places[:, 0] == number, 2]
            if own.max(initial=0) > file.size_bytes:
                raise _damaged(self._folder, f"the file {name} is incomplete")
            self._files.append(file)
        self._is_verified = np.zeros(len(self._places), bool)

    def _manifest(self) -> Message:
        path = self._folder / MANIFEST
        if not path.exists():
            raise _unfinished(self._folder)
        file = RecordFile(path)
        end = file.record_at(len(HEAD)) if file.is_valid else None
        if end is None:
            raise _damaged(self._folder, "its manifest is incomplete or of another version")
        return file.message(len(HEAD), end)

    def __reduce__(self) -> tuple[Any, ...]:
        return SnapshotBatches, (self._folder,)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        number, place, end = self._places[index].tolist()
        file = self._files[number]
        if not self._is_verified[index]:
            if file.record_at(place) != end:
                raise _damaged(
                    self._folder,
                    f"batch {index}, at byte {place} of the file {file.path.name}, fails its "
                    "checksum",
                )
            self._is_verified[index] = True
        return unpack_batch(file.message(place, end))


class SnapshotSource(SequenceSource):
    """The batches of a finished snapshot; see `SnapshotBatches`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(SnapshotBatches(folder))


def is_snapshot(folder: Path) -> bool:
    """Returns True if a folder has a finished snapshot."""
    return (folder / MANIFEST).exists()


def _unfinished(folder: Path) -> Exception:
    if not folder.is_dir():
        return NotFoundError(
            explain(
                f"There is no snapshot at {folder}.",
                expected="a folder that sg.input.service.save has written.",
                fix="correct the path, or save the dataset there.",
            )
        )
    return DataLossError(
        explain(
            f"The snapshot {folder} is not finished: it has no manifest.",
            expected="a snapshot whose sg.input.service.save has returned.",
            fix="call sg.input.service.save again with the same dataset and path, which continues "
            "it.",
            code="SG314",
        )
    )


def _damaged(folder: Path, how: str) -> DataLossError:
    return DataLossError(
        explain(
            f"The snapshot {folder} is damaged: {how}.",
            expected="unmodified files written by sg.input.service.save.",
            fix="delete the folder, and save the dataset again.",
            code="SG314",
        )
    )
