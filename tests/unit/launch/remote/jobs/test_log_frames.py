"""Frames in a log among other lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.launch.remote.jobs.job_log import (
    FrameReader,
    FrameWriter,
    LogFrame,
    signed,
    verified,
)
from tests.fuzzing import JSON, fuzz


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "log"


def _written(log: Path, *frames: tuple[str, str, str], before: bytes = b"") -> str:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, before)
    writer = FrameWriter("n0", descriptor)
    for kind, text, task in frames:
        writer.write(kind, text, task)
    os.close(descriptor)
    return log.read_text()


def test_what_is_printed_arrives_as_it_was_among_lines_of_others(log) -> None:
    text = _written(
        log,
        ("out", "10%\r50%\r\u2713\n", "worker 1"),
        ("err", "", ""),
        before=b"Runtime env is setting up.\nhalf a line",
    )
    reader = FrameReader("n0")
    frames = [frame for letter in text for frame in reader.feed(letter)]
    assert frames == [LogFrame("out", "worker 1", "10%\r50%\r\u2713\n"), LogFrame("err", "", "")]
    assert reader.others == ["Runtime env is setting up.", "half a line"]


def test_long_text_comes_in_several_frames(log) -> None:
    text = "x\n" * 50_000
    frames = list(FrameReader("n0").feed(_written(log, ("out", text, ""))))
    assert len(frames) > 1
    assert "".join(frame.text for frame in frames) == text


def test_log_that_is_read_again_is_shown_once(log) -> None:
    text = _written(log, ("out", "a", ""), ("out", "b", ""), ("out", "c", ""))
    reader = FrameReader("n0")
    cut = text.index("b") + 1
    first = list(reader.feed(text[:cut]))
    again = list(reader.feed("\n" + text))
    assert [frame.text for frame in first + again] == ["a", "b", "c"]


def test_frame_of_another_job_is_none(log) -> None:
    reader = FrameReader("n1")
    assert list(reader.feed(_written(log, ("answer", "x", "")))) == []


def test_answer_is_known_by_its_signature() -> None:
    text = signed(b"content", b"key")
    assert verified(text, b"key") == b"content"
    for wrong in (signed(b"content", b"other"), signed(b"other", b"key")[:44] + text[44:]):
        with pytest.raises(ValueError, match="signature of the job's answer is wrong"):
            verified(wrong, b"key")


@fuzz
@given(st.lists(st.one_of(JSON.map(json.dumps), st.text(max_size=50)), max_size=20))
def test_any_line_of_a_log_is_a_frame_or_not(lines) -> None:
    reader = FrameReader("n")
    for line in lines:
        for frame in reader.feed(f"\n\x1en{line}\n{line}\n"):
            assert list(map(type, (frame.kind, frame.task, frame.text))) == [str] * 3
        assert len(reader.others) <= 100
