"""Versions in a folder, and each kind of damage."""

from __future__ import annotations

import json

import pytest

from stratagem.errors import DataLossError, NotFoundError
from stratagem.parameter_server.server.tables.table_versions import TableVersions, file_name


def fields_of(number: int, base: int | None) -> dict[str, object]:
    part = {
        "file": file_name(number, "a/b", 0),
        "base": base and f"save {base}",
        "size_bytes": number,
        "buckets": [0, 4096],
    }
    return {"save": f"save {number}", "base": base, "tables": {"a/b": {"parts": [part]}}}


@pytest.fixture
def versions(tmp_path) -> TableVersions:
    versions = TableVersions(tmp_path / "saved")
    for base in (None, 1, 2):
        number = versions.begin()
        versions.write_manifest(number, fields_of(number, base))
    return versions


def test_versions_count_up_and_continue_each_other(versions) -> None:
    assert versions.numbers == [1, 2, 3]
    assert versions.chain(3, "a/b", 0) == {
        "files": [(f"{one:08d}/a%2Fb-0.rows", one, f"save {one}") for one in (3, 2, 1)],
        "buckets": [0, 4096],
    }
    assert versions.manifest(2)["base"] == 1


def test_unfinished_version_does_not_count(versions) -> None:
    assert versions.begin() == 4
    assert versions.numbers == [1, 2, 3]
    assert versions.begin() == 5  # a server may still write to the former
    assert not versions.path(4).exists()


def test_chosen_version(versions, tmp_path) -> None:
    assert (versions.latest, versions.chosen(None), versions.chosen(1)) == (None, 3, 1)
    versions.publish(2)
    assert (versions.latest, versions.chosen(None), versions.chosen(3)) == (2, 2, 3)
    assert TableVersions(versions.folder).latest == 2
    with pytest.raises(NotFoundError, match=r"no version 7 of tables.\nExpected one of its ver"):
        versions.chosen(7)
    with pytest.raises(NotFoundError, match="has no versions of tables"):
        TableVersions(tmp_path).chosen(None)
    versions.remove(2)
    with pytest.raises(NotFoundError, match="no version 2 of tables"):
        versions.chosen(None)
    (versions.folder / "LATEST").write_text("two")
    with pytest.raises(DataLossError, match="LATEST cannot be read: it is no number"):
        versions.chosen(None)


def test_damaged_manifest(versions) -> None:
    path = versions.path(2) / "manifest.json"
    text = path.read_text()
    saved = json.loads(text)
    for wrong, how in (
        (text[:-9], "it is no manifest"),
        ("[1]", "it is no manifest"),
        (text.replace("save 1", "save 9"), "its checksum is wrong"),
        (json.dumps({**saved, "crc32": 3}), "its checksum is wrong"),
    ):
        path.write_text(wrong)
        with pytest.raises(DataLossError, match=f"00000002/manifest.json cannot be read: {how}"):
            versions.chain(3, "a/b", 0)
    path.unlink()
    with pytest.raises(
        DataLossError, match=r"00000002/manifest.json cannot be read: it is missing"
    ):
        versions.chain(3, "a/b", 0)
    versions.write_manifest(2, {**fields_of(2, 1), "save": "another"})
    with pytest.raises(DataLossError, match="the next version does not continue this one"):
        versions.chain(3, "a/b", 0)
    (versions.path(3) / "manifest.json").rename(path)
    with pytest.raises(DataLossError, match="it is version 3 of format 1"):
        versions.manifest(2)
