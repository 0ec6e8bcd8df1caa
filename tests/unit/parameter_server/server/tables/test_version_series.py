"""Versions of a series of checkpoints: what the next one continues, and what nothing needs."""

from __future__ import annotations

import pytest

from stratagem.parameter_server.server.tables.table_versions import (
    CHECKPOINT,
    TableVersions,
    base_of_next,
    remove_unneeded,
)


class Versions(TableVersions):
    """Versions of one table in two files, the second of which is always full."""

    def add(self, size_bytes: int, base: int | None = None, checkpoint: str = "") -> int:
        number = self.begin()
        parts = [
            {
                "file": f"{number:08d}/t-0.rows",
                "size_bytes": size_bytes,
                "base": base and str(base),
            },
            {"file": f"{number:08d}/t-1.rows", "size_bytes": 1, "base": None},
        ]
        for part in parts:
            (self.folder / part["file"]).write_bytes(bytes(part["size_bytes"]))
        fields = {"save": str(number), "base": base, CHECKPOINT: checkpoint or f"ckpt-{number}"}
        self.write_manifest(number, {**fields, "tables": {"t": {"parts": parts}}})
        return number


@pytest.fixture
def versions(tmp_path) -> Versions:
    return Versions(tmp_path)


def test_next_version_continues_until_it_is_time_for_all_rows(versions) -> None:
    assert base_of_next(versions, None, 3) is None
    assert base_of_next(versions, "ckpt-1", 3) is None
    versions.add(100)
    assert base_of_next(versions, "ckpt-1", 3) == 1
    assert base_of_next(versions, "ckpt-1", 2) == 1
    assert base_of_next(versions, "ckpt-1", 1) is None
    versions.add(10, 1)
    assert base_of_next(versions, "ckpt-2", 3) == 2
    assert base_of_next(versions, "ckpt-2", 2) is None
    versions.add(10, 2)
    assert base_of_next(versions, "ckpt-3", 4) == 3
    assert base_of_next(versions, "ckpt-3", 3) is None
    assert base_of_next(versions, "ckpt-1", 3) == 1  # training continued from there
    versions.add(10, 1, "ckpt-2")
    assert base_of_next(versions, "ckpt-2", 3) == 4  # it was saved again


def test_changes_larger_than_the_rows_are_not_continued(versions) -> None:
    versions.add(100)
    versions.add(60, 1)
    assert base_of_next(versions, "ckpt-2", 9) == 2
    versions.add(60, 2)
    assert base_of_next(versions, "ckpt-3", 9) is None


def test_missing_or_damaged_version_is_not_continued(versions) -> None:
    for size_bytes, base in ((100, None), (10, 1), (10, 2)):
        versions.add(size_bytes, base)
    assert base_of_next(versions, "ckpt-3", 9) == 3
    file = versions.path(1) / "t-0.rows"
    file.write_bytes(b"torn")
    assert base_of_next(versions, "ckpt-3", 9) is None
    file.unlink()
    assert base_of_next(versions, "ckpt-3", 9) is None
    versions.remove(1)
    assert base_of_next(versions, "ckpt-3", 9) is None


def test_versions_that_no_checkpoint_needs_are_removed(versions) -> None:
    for base in (None, 1, 2, None, 4, 3, 5):
        versions.add(10, base)
    remove_unneeded(versions, [])
    assert len(versions.numbers) == 7  # their checkpoints may be about to be written
    remove_unneeded(versions, ["ckpt-3", "ckpt-5", "ckpt-9"])
    assert versions.numbers == [1, 2, 3, 4, 5, 6, 7]
    remove_unneeded(versions, ["ckpt-5"])
    assert versions.numbers == [4, 5, 6, 7]
    (versions.path(7) / "manifest.json").write_bytes(b"torn")
    remove_unneeded(versions, ["ckpt-6"])
    assert versions.numbers == [4, 5, 6, 7]
    versions.remove(7)
    remove_unneeded(versions, ["ckpt-6"])
    assert versions.numbers == [6]


def test_version_without_changes_needs_no_other(versions) -> None:
    """A server that was restarted saved all rows, although changes were requested."""
    versions.add(10)
    number = versions.begin()
    part = {"file": f"{number:08d}/t-0.rows", "size_bytes": 0, "base": None}
    fields = {"save": "2", "base": 1, CHECKPOINT: "ckpt-2", "tables": {"t": {"parts": [part]}}}
    versions.write_manifest(number, fields)
    remove_unneeded(versions, ["ckpt-2"])
    assert versions.numbers == [2]
