"""`save`: writes the batches of a dataset to disk, read by input workers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import IO, Any

import numpy as np

from stratagem.errors import explain
from stratagem.group.transport.journal import sync, write_all, write_record
from stratagem.group.transport.journal_lock import JournalLock
from stratagem.group.transport.wire import Message, pack
from stratagem.input.batch_messages import pack_batch
from stratagem.input.service.client import ServiceReader, ServiceSource
from stratagem.input.service.consumer import ConsumerPosition
from stratagem.input.service.job_requests import JobRequest
from stratagem.input.service.splits import ShardingPolicy, SourceFacts, facts_of
from stratagem.input.snapshots import HEAD, MANIFEST, RecordFile, is_snapshot
from stratagem.input.sources.adapters import as_source
from stratagem.input.sources.source import INFINITE_CARDINALITY, Source
from stratagem.resources import Closing

_MOST_FILE_BYTES = 2**30
_FILES = "batches-*.records"


def save(dataset: Any, path: str | os.PathLike[str], service: str) -> None:
    """Saves the first epoch of a dataset, read by input workers, for `sg.input.Dataset.load`.

    Workers read and prepare the batches, and this process writes them. The snapshot has them in the
    order of the dataset; those of files come file by file. If it is interrupted, the same call
    continues it.

    Args:
        dataset: any dataset that `distribute_dataset` takes, can be pickled and can be read again.
        path: folder of the snapshot, which is created.
        service: address of the dispatcher, its `target`.

    Raises:
        FileExistsError: the folder has a finished snapshot.
        OSError: the files cannot be written.
        ValueError: the dataset has no end, or may have other batches when it is read again; or the
            folder has an unfinished snapshot of another dataset.

    Example:
        >>> import tempfile
        >>> dispatcher = sg.input.service.DispatchServer()
        >>> config = sg.input.service.WorkerConfig(dispatcher.target)
        >>> worker = sg.input.service.WorkerServer(config)
        >>> dataset = sg.input.Dataset(np.arange(5), batch_size=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sg.input.service.save(dataset, f"{folder}/numbers", dispatcher.target)
        ...     print([batch.tolist() for batch in sg.input.Dataset.load(f"{folder}/numbers")])
        [[0, 1], [2, 3], [4]]
        >>> worker.stop()
        >>> dispatcher.stop()

    Source: TF 2.21 distributed_save_op.py, distributed_save.
    """
    source, folder = as_source(dataset), Path(path).absolute()
    _check_end(source)
    wanted = JobRequest.checked(ShardingPolicy.DYNAMIC, None, None, None, None, is_exact=True)
    served = ServiceSource(service, wanted, source)
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(_SnapshotWriter(folder, facts_of(source)))
        served.register()
        reader = served.open(0)
        stack.callback(reader.close)
        assert isinstance(reader, ServiceReader)
        if (position := writer.position()) is not None:
            reader.restore(position)
        for batch in reader:
            writer.add(*reader.identity, batch)
        writer.finish()


def _check_end(source: Source) -> None:
    if source.cardinality == INFINITE_CARDINALITY:
        raise ValueError(
            explain(
                "save received a dataset without an end.",
                expected="a dataset that ends.",
                fix="save one repetition, and call repeat() on the loaded dataset.",
            )
        )


class _SnapshotWriter(Closing):
    """Writes batches to the files of a snapshot, after those of an interrupted one.

    Raises:
        FileExistsError: the folder has a finished snapshot.
        ValueError: the folder has an unfinished snapshot of another dataset.
    """

    def __init__(self, folder: Path, facts: SourceFacts) -> None:
        self._folder = folder
        self._facts = dataclasses.asdict(facts)
        # Batches by split and index: the file number, and where the record begins and ends.
        self._places: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._names: list[str] = []
        self._file: IO[bytes] | None = None
        self._lock = JournalLock(folder / "snapshot.lock")
        try:
            if is_snapshot(folder):
                raise FileExistsError(
                    explain(
                        f"The folder {folder} has a finished snapshot.",
                        expected="a new folder, or one with an unfinished snapshot.",
                        fix="delete the folder to save the dataset anew, or pass another path.",
                    )
                )
            for found in sorted(folder.glob(_FILES)):
                self._recover(found)
        except BaseException:
            self.close()
            raise

    def _recover(self, path: Path) -> None:
        """Finds the intact records of a file; what follows them was not written completely."""
        file = RecordFile(path)
        self._names.append(path.name)
        place = len(HEAD)
        while file.is_valid and (end := file.record_at(place)) is not None:
            message = file.message(place, end)
            if message.kind == "batch":
                identity = message.fields["split"], message.fields["index"]
                self._places[identity] = len(self._names) - 1, place, end
            elif message.fields["facts"] != self._facts:
                raise ValueError(
                    explain(
                        f"The folder {self._folder} has an unfinished snapshot of a dataset with "
                        f"{message.fields['facts']}; this one has {self._facts}.",
                        expected="the same dataset, or a new folder.",
                        fix="delete the folder, or pass another path.",
                    )
                )
            place = end

    def position(self) -> dict[str, Any] | None:
        """Returns the position of a consumer that has the batches of the snapshot, if any."""
        if not self._places:
            return None
        position = ConsumerPosition()
        for split, index in self._places:
            position.add(split, index)
        return position.state(num_consumers=1, num_lanes=None)

    def add(self, split: int, index: int, batch: Any) -> None:
        """Writes a batch."""
        if self._file is not None and self._file.tell() > _MOST_FILE_BYTES:
            self._end_file()
        if self._file is None:
            self._names.append(f"batches-{len(self._names):05}.records")
            self._file = (self._folder / self._names[-1]).open("xb", buffering=0)
            write_all(self._file, HEAD)
            write_record(self._file, pack(Message("facts", {"facts": self._facts})))
        place = self._file.tell()
        write_record(self._file, pack(pack_batch(batch, split=split, index=index)))
        self._places[split, index] = len(self._names) - 1, place, self._file.tell()

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
        new = self._folder / f"{MANIFEST}.new"
        with new.open("wb", buffering=0) as file:
            write_all(file, HEAD)
            write_record(file, pack(Message("snapshot", {"files": self._names}, [array])))
            sync(file)
        new.replace(self._folder / MANIFEST)

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
        self._lock.close()
