"""Files of the rooms that run with a GPU, and the tests that are left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from validation.on_gpu.rooms import (
    NOT_FOR_A_GPU,
    ROOMS,
    ROOT,
    files_of,
    needs_several,
    not_for_a_gpu,
    room_of,
)


def test_rooms_hold_each_file_once_in_their_order() -> None:
    files = files_of(ROOMS)
    assert len(files) == len(set(files)) > 100
    assert files[: len(files_of(["strategies"]))] == files_of(["strategies"])
    rooms = list(dict.fromkeys(room_of(f"{file}::test_one") for file in files))
    assert rooms == list(ROOMS)
    assert room_of("tests/unit/launch/test_scripts.py::test_one") == "other"


def test_unknown_room_and_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Unknown room 'kitchen'\. Expected some of strategies"):
        files_of(["kitchen"])
    with pytest.raises(
        ValueError, match="tests/unit/strategies of the room 'strategies' has no tests"
    ):
        files_of(["strategies"], tmp_path)


def test_tests_that_are_left_out_exist_and_have_a_reason() -> None:
    for start, reason in NOT_FOR_A_GPU.items():
        file, _, name = start.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name.partition('[')[0]}(" in text, start
        assert len(reason.split()) > 2
        assert not_for_a_gpu(f"{start}[row]" if name and "[" not in name else start) == reason
    for file in {one.partition("::")[0] for one in needs_several()}:
        assert (ROOT / file).is_file(), f"{file} of needs_several.txt"
    assert (
        not_for_a_gpu("tests/unit/strategies/test_elastic_admission.py::test_none_of_this_name")
        is None
    )
