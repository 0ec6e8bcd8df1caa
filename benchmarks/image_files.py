"""JPEG images in files of several formats, written once on this machine."""

from __future__ import annotations

import io
import os
import shutil
import struct
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.encoded_images import decode, encoded_images
from benchmarks.workloads import Array

__all__ = ["FORMATS", "NUM_READERS", "image_files", "parse", "read_image"]

NUM_READERS = 2  # processes, or threads, in which each side decodes
_NUM_FILES, _NUM_EXAMPLES = 8, 1600
_NUM_CLASSES = 10
_Example = tuple[bytes, int]


def image_files(file_format: str) -> list[str]:
    """Returns the paths of the files of a format, sorted; writes them if they are missing."""
    folder = Path(tempfile.gettempdir(), f"stratagem-bench-{os.getuid()}", file_format)
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent))
        for place in range(_NUM_FILES):
            FORMATS[file_format](new / f"{place:05d}", list(_examples(place)))
        try:
            new.rename(folder)
        except OSError:  # another side was faster
            shutil.rmtree(new)
    return sorted(str(path) for path in folder.rglob("*") if path.is_file())


def read_image(path: str) -> tuple[Array, np.int32]:
    """Returns the example in a file of an image, whose folder is its label."""
    return decode(Path(path).read_bytes()), np.int32(Path(path).parent.name)


def parse(record: bytes) -> tuple[Array, np.int32]:
    """Returns the example in a record."""
    (label,) = struct.unpack_from("<i", record)
    return decode(record[4:]), np.int32(label)


def _examples(place: int) -> Iterator[_Example]:
    images = encoded_images()
    for number in range(place, _NUM_EXAMPLES, _NUM_FILES):
        yield images[number % len(images)], number % _NUM_CLASSES


def _record(example: _Example) -> bytes:
    image, label = example
    return struct.pack("<i", label) + image


def _write_images(path: Path, examples: list[_Example]) -> None:
    for number, (image, label) in enumerate(examples):
        folder = path.parent / str(label)
        folder.mkdir(exist_ok=True)
        (folder / f"{path.name}-{number:05d}.jpeg").write_bytes(image)


def _write_tfrecord(path: Path, examples: list[_Example]) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("wb") as file:
        writer = RecordWriter(file)
        for example in examples:
            writer.write(_record(example))


def _write_array_record(path: Path, examples: list[_Example]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for example in examples:
        writer.write(_record(example))
    writer.close()


def _write_webdataset(path: Path, examples: list[_Example]) -> None:
    with tarfile.open(path.with_suffix(".tar"), "w") as archive:
        for number, (image, label) in enumerate(examples):
            for suffix, data in (("jpeg", image), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def _write_parquet(path: Path, examples: list[_Example]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images, labels = zip(*examples, strict=True)
    table = pa.table(
        {"image": pa.array(images, pa.binary()), "label": pa.array(labels, pa.int32())}
    )
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=50)


FORMATS: dict[str, Callable[[Path, list[_Example]], None]] = {
    "images in folders": _write_images,
    "TFRecord": _write_tfrecord,
    "ArrayRecord": _write_array_record,
    "webdataset": _write_webdataset,
    "Parquet": _write_parquet,
}
"""Writers of one file, or for images of their part of the folders, by format."""
