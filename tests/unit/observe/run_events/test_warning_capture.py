"""Copies of warnings; what the program shows stays as it was."""

from __future__ import annotations

import logging
import warnings

import pytest

from stratagem.observe.run_events.process_writer import MAX_WARNINGS, WarningCapture
from stratagem.observe.run_events.reader import read_run
from stratagem.observe.run_events.records import WarningEvent
from stratagem.observe.run_events.writer import EventWriter


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    """Texts that Python would print; what `start` replaces is restored."""
    found: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_, **__: found.append(str(text)))
    factory = logging.getLogRecordFactory()
    yield found
    logging.setLogRecordFactory(factory)


@pytest.fixture
def recorded(tmp_path):
    """Runs a function while warnings are recorded, and returns the events."""

    def record(call) -> list[tuple[str, str, str]]:
        with EventWriter(tmp_path, "worker", 0, num_processes=1) as writer:
            capture = WarningCapture(writer)
            capture.start()
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                call()
            capture.stop()
        (process,) = read_run(tmp_path).processes
        events = [event for event in process.events if isinstance(event, WarningEvent)]
        return [(event.text, event.category, event.origin) for event in events]

    return record


def test_warning_is_recorded_once_and_shown_each_time(shown, recorded) -> None:
    def call() -> None:
        for _ in range(3):
            warnings.warn("slow", UserWarning, stacklevel=1)

    ((text, category, origin),) = recorded(call)
    assert (text, category) == ("slow", "UserWarning")
    assert origin.startswith(f"{__file__}:")
    assert shown == ["slow"] * 3


def test_log_record_is_recorded_and_handled(shown, recorded, monkeypatch) -> None:
    """One with wrong arguments too, which logging itself reports."""
    handled: list[logging.LogRecord] = []
    logger = logging.getLogger("train.data")
    handler = logging.NullHandler()
    monkeypatch.setattr(handler, "handle", handled.append)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.INFO)

    def call() -> None:
        logger.warning("%d rows are empty", 3)
        logger.error("wrong %d", "arguments")
        logger.info("fine")

    assert recorded(call) == [
        ("3 rows are empty", "WARNING", "train.data"),
        ("wrong %d", "ERROR", "train.data"),
    ]
    assert [record.msg for record in handled] == ["%d rows are empty", "wrong %d", "fine"]


def test_number_and_length_are_bounded(shown, recorded) -> None:
    def call() -> None:
        for number in range(MAX_WARNINGS + 20):
            warnings.warn(f"{number} " + 5000 * "x", UserWarning, stacklevel=1)

    found = recorded(call)
    assert len(found) == MAX_WARNINGS
    assert {len(text) for text, _, _ in found} == {1000}
    assert len(shown) == MAX_WARNINGS + 20


def test_nothing_is_left_behind(shown, recorded) -> None:
    before = warnings.showwarning, logging.getLogRecordFactory()
    recorded(lambda: None)
    assert (warnings.showwarning, logging.getLogRecordFactory()) == before


def test_root_logger_gets_no_handler(shown, recorded) -> None:
    """One would turn off `logging.basicConfig`."""
    handlers = list(logging.getLogger().handlers)
    found = []
    recorded(lambda: found.extend(logging.getLogger().handlers))
    assert found == handlers


def test_warning_of_the_writer_itself_ends(shown, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        writer = EventWriter(tmp_path / "file", "worker", 0, num_processes=1)
        capture = WarningCapture(writer)
        capture.start()
        warnings.warn("slow", UserWarning, stacklevel=1)
        capture.stop()
    assert shown[-1] == "slow"
