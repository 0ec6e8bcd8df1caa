"""Snapshots: the batches of a dataset in record files, read in place through memory maps.

A folder has files of batches, and a manifest, which is written last: the place of each batch, in
the order of the dataset. A folder without a manifest is a snapshot that is not finished.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from stratagem.errors import DataLossError, NotFoundError, explain
from stratagem.group.transport.journal import (
    HEADER_BYTES,
    frames_in,
    record_at,
    sync,
    write_all,
    write_record,
)
from stratagem.group.transport.journal_lock import JournalLock
from stratagem.group.transport.wire import Message, pack, unpack
from stratagem.input.batch_messages import pack_batch, unpack_batch
from stratagem.input.sources.sequences import SequenceSource
from stratagem.resources import Closing

_HEAD = b"stratagem snapshot 1\n"
_MANIFEST = "manifest"
_MOST_FILE_BYTES = 2**30
_FILES = "batches-*.records"


class RecordFile:
    """A file of a snapshot, mapped into memory: a line that names the format, then records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.size_bytes = os.fstat(file.fileno()).st_size
            has_data = self.size_bytes >= len(_HEAD)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if has_data else None
        self.is_valid = self._map is not None and self._map[: len(_HEAD)] == _HEAD

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
        path = self._folder / _MANIFEST
        if not path.exists():
            raise _unfinished(self._folder)
        file = RecordFile(path)
        end = file.record_at(len(_HEAD)) if file.is_valid else None
        if end is None:
            raise _damaged(self._folder, "its manifest is incomplete or of another version")
        return file.message(len(_HEAD), end)

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


class SnapshotWriter(Closing):
    """Writes batches to the files of a snapshot, after those of an interrupted one.

    `facts` say which dataset it is, as JSON. `position` is what came with the last batch that was
    written completely, None without one.

    Raises:
        FileExistsError: the folder has a finished snapshot.
        ValueError: the folder has an unfinished snapshot of another dataset.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self._folder = folder
        self._facts = facts
        # Batches by split and index: the file number, and where the record begins and ends.
        self._places: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.position: Any = None
        self._names: list[str] = []
        self._file: IO[bytes] | None = None
        self._lock = JournalLock(folder / "snapshot.lock")
        try:
            if (folder / _MANIFEST).exists():
                raise FileExistsError(
                    explain(
                        f"The folder {folder} has a finished snapshot.",
                        expected="a new folder, or one with an unfinished snapshot.",
                        fix="delete the folder to save the dataset anew, or pass another path.",
                    )
                )
            has_gap = False
            for found in sorted(folder.glob(_FILES)):
                has_gap = self._recover(found, has_gap)
        except BaseException:
            self.close()
            raise

    def _recover(self, path: Path, has_gap: bool) -> bool:
        """Finds the intact records of a file; what follows them was not written completely.

        Returns True once batches are missing.
        """
        file = RecordFile(path)
        self._names.append(path.name)
        place = len(_HEAD)
        while file.is_valid and (end := file.record_at(place)) is not None:
            message = file.message(place, end)
            if message.kind == "batch":
                identity = message.fields["split"], message.fields["index"]
                self._places[identity] = len(self._names) - 1, place, end
                if not has_gap:  # Else they are written again.
                    self.position = message.fields["position"]
            elif message.fields["facts"] != self._facts:
                raise ValueError(
                    explain(
                        f"The folder {self._folder} has an unfinished snapshot of a dataset with "
                        f"{message.fields['facts']}; this one has {self._facts}.",
                        expected="the same dataset, or a new folder.",
                        fix="delete the folder, or pass another path.",
                    )
                )
            else:  # Records before this file may be damaged since.
                has_gap = has_gap or message.fields["position"] != self.position
            place = end
        return has_gap

    def add(self, split: int, index: int, batch: Any, position: Any) -> None:
        """Writes a batch, and the position behind it as JSON."""
        if self._file is not None and self._file.tell() > _MOST_FILE_BYTES:
            self._end_file()
        if self._file is None:
            self._names.append(f"batches-{len(self._names):05}.records")
            self._file = (self._folder / self._names[-1]).open("xb", buffering=0)
            facts = {"facts": self._facts, "position": self.position}
            write_all(self._file, _HEAD)
            write_record(self._file, pack(Message("facts", facts)))
        place = self._file.tell()
        packed = pack_batch(batch, split=split, index=index, position=position)
        write_record(self._file, pack(packed))
        self._places[split, index] = len(self._names) - 1, place, self._file.tell()
        self.position = position

    def _end_file(self) -> None:
        if self._file is not None:
            sync(self._file)
            self._file.close()
            self._file = None

    def finish(self) -> None:
        """Writes the manifest, which makes the snapshot valid."""
        self._end_file()
        places = [self._places[identity] for identity in sorted(self._places)]
        array = np.array(places, np.int64).reshape(-1, 3)
        new = self._folder / f"{_MANIFEST}.new"
        with new.open("wb", buffering=0) as file:
            write_all(file, _HEAD)
            write_record(file, pack(Message("snapshot", {"files": self._names}, [array])))
            sync(file)
        new.replace(self._folder / _MANIFEST)

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
        self._lock.close()
