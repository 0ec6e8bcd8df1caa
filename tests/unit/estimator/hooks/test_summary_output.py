"""Writer of a hook: its own, the session's, or none, and who closes it."""

from __future__ import annotations

import types
from typing import Any

import pytest

import stratagem as sg
from stratagem.estimator.hooks.step_counter import SummaryOutput
from tests.unit.execution.summary.events import Read


class Writer:
    """Counts the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def session(folder: Any, *, is_chief: bool = True) -> Any:
    return types.SimpleNamespace(model_dir=str(folder), summary_writer=Writer(), is_chief=is_chief)


def test_external_writer_is_used_and_only_flushed(tmp_path) -> None:
    writer = Writer()
    output = SummaryOutput(tmp_path / "other", writer)
    output.open(session(tmp_path))
    output.close()
    output.close()
    assert writer.calls == ["flush"]
    assert not (tmp_path / "other").exists()


def test_writer_of_the_session_is_used_for_its_folder(tmp_path) -> None:
    output, own = SummaryOutput(tmp_path / "a" / "..", None), session(tmp_path)
    (tmp_path / "a").mkdir()
    output.open(own)
    output.close()
    assert own.summary_writer.calls == ["flush"]


def test_another_folder_gets_a_file_of_its_own(tmp_path) -> None:
    output = SummaryOutput(str(tmp_path / "other"), None)
    output.open(session(tmp_path))
    output.write({"steps_per_s": 2.5}, 7)
    output.close()
    assert Read(tmp_path / "other").numbers("steps_per_s") == [(7, 2.5)]


@pytest.mark.parametrize(
    ("folder", "is_chief"), [(None, True), ("other", False)], ids=["no folder", "no chief"]
)
def test_otherwise_nothing_is_written(folder, is_chief, tmp_path) -> None:
    output = SummaryOutput(folder and tmp_path / folder, None)
    output.open(session(tmp_path, is_chief=is_chief))
    with sg.summary.create_noop_writer().as_default():
        output.write({"loss": 1.0}, 1)
    output.close()
    assert list(tmp_path.iterdir()) == []
