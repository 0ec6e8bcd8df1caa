"""A summary of a traced step: its step, and the writer that takes it."""

from __future__ import annotations

import dataclasses

import pytest

from stratagem.execution.summary.collector import Summary


@dataclasses.dataclass
class Writer:
    is_active: bool
    has_folder: bool


ACTIVE, ELSEWHERE, NONE = Writer(True, True), Writer(False, True), Writer(False, False)


@pytest.mark.parametrize(
    ("own", "default", "here", "anywhere"),
    [
        (None, None, None, None),
        (None, ACTIVE, ACTIVE, ACTIVE),
        (ELSEWHERE, ACTIVE, None, ELSEWHERE),
        (NONE, ACTIVE, None, None),
        (ACTIVE, NONE, ACTIVE, ACTIVE),
    ],
    ids=["no writer", "default", "in another process", "noop", "own"],
)
def test_writer_of_the_step_goes_before_the_default(own, default, here, anywhere) -> None:
    summary = Summary("loss", float, own)
    assert summary.writer_of(default) is here
    assert summary.writer_of(default, is_anywhere=True) is anywhere


@pytest.mark.parametrize(
    ("step", "traced", "needed"),
    [(None, False, True), (None, True, False), (0, False, False), (3, False, False)],
)
def test_step_is_needed_unless_the_call_gave_one(step, traced, needed) -> None:
    assert Summary("loss", float, step=step, has_traced_step=traced).needs_step is needed
