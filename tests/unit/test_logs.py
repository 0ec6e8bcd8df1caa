"""Log records and warnings: the process that shows them, their form, and the program's handlers."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest

import stratagem as sg
from stratagem import logs

ROOT = logging.getLogger("stratagem")
LOGGER = logging.getLogger("stratagem.estimator.hooks.example")
WORKERS = {"worker": ["a:1", "b:1"]}


@pytest.fixture(autouse=True)
def plain(monkeypatch) -> Iterator[None]:
    for name in ("TF_CONFIG", "STRATAGEM_LOG_LEVEL", "STRATAGEM_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("STRATAGEM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(logs._LogState, "task", None)
    yield
    logs.reset()


@contextlib.contextmanager
def root_handlers(*handlers: logging.Handler) -> Iterator[None]:
    """Replaces the handlers of pytest, which has some at the root and at our logger."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, list(handlers)
    ours, ROOT.handlers = (
        ROOT.handlers,
        [one for one in ROOT.handlers if isinstance(one, logs.LogHandler)],
    )
    try:
        yield
    finally:
        root.handlers, ROOT.handlers = before, ours


def become(monkeypatch, task_type: str, index: int, cluster=WORKERS) -> None:
    config = {"cluster": cluster, "task": {"type": task_type, "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def shown_levels(capsys) -> list[str]:
    with root_handlers():
        for level in ("debug", "info", "warning", "error"):
            getattr(LOGGER, level)("is %s", level)
    return [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize(
    ("task_type", "index", "cluster", "leads"),
    [
        ("worker", 0, WORKERS, True),
        ("worker", 1, WORKERS, False),
        ("chief", 0, {"chief": ["a:1"], **WORKERS}, True),
        ("worker", 0, {"chief": ["a:1"], **WORKERS}, False),
        ("ps", 0, {"ps": ["a:1"], **WORKERS}, False),
        ("evaluator", 0, WORKERS, True),
    ],
)
def test_leader_shows_progress(capsys, monkeypatch, task_type, index, cluster, leads) -> None:
    become(monkeypatch, task_type, index, cluster)
    assert ("info" in shown_levels(capsys)) is leads


def test_group_that_was_joined_counts_more_than_tf_config(capsys, monkeypatch) -> None:
    become(monkeypatch, "worker", 0)
    logs.set_task("worker 1", 1)
    assert shown_levels(capsys) == ["warning", "error"]
    logs.set_task("worker 0", 0)
    assert "info" in shown_levels(capsys)


@pytest.mark.parametrize("text", ["{", "[]", '{"task": 1}', '{"cluster": {}, "task": {}}'])
def test_invalid_tf_config_is_no_task(capsys, monkeypatch, text) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    assert shown_levels(capsys) == ["warning", "error"]


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
@pytest.mark.parametrize("index", [0, 1])
def test_level_counts_for_all_tasks(capsys, monkeypatch, level, index) -> None:
    become(monkeypatch, "worker", index)
    levels = ["debug", "info", "warning", "error"]
    monkeypatch.setenv("STRATAGEM_LOG_LEVEL", level.upper())
    assert shown_levels(capsys) == levels[levels.index(level) :]
    monkeypatch.setenv("STRATAGEM_LOG_LEVEL", "error")
    sg.config.show_logs(level)
    assert shown_levels(capsys) == levels[levels.index(level) :]
    assert sg.config.log_level() == level


def test_line_has_time_level_and_task(capsys, monkeypatch) -> None:
    become(monkeypatch, "worker", 1)
    with root_handlers():
        LOGGER.warning("100 %% of %s", "it")
        monkeypatch.setenv("STRATAGEM_RESTART_COUNT", "0")  # the launcher shows the name
        LOGGER.warning("again")
    first, second = capsys.readouterr().err.splitlines()
    assert first.split(maxsplit=1)[1] == "WARNING worker 1: 100 % of it"
    assert second.split(maxsplit=1)[1] == "WARNING again"


def test_json_lines_are_parsed(capsys, monkeypatch) -> None:
    become(monkeypatch, "worker", 1)
    monkeypatch.setenv("STRATAGEM_LOG_FORMAT", "json")
    with root_handlers():
        LOGGER.warning("two\nlines, %s", "é")
        try:
            raise ValueError("no data")
        except ValueError:
            LOGGER.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "WARNING",
        "logger": LOGGER.name,
        "task": "worker 1",
        "message": "two\nlines, é",
    }
    assert second["exception"].endswith("ValueError: no data")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"log_level": "loud"}, "'loud' is not a log level"),
        ({"log_level": ""}, "'' is not a log level"),
        ({"log_format": "xml"}, "'xml' is not a log format"),
    ],
)
def test_other_words_are_refused(arguments, words) -> None:
    with pytest.raises(ValueError, match=words):
        sg.config.show_logs(**arguments)
    assert (sg.config.log_level(), sg.config.log_format()) == ("auto", "text")


def test_wrong_variable_is_a_warning_and_the_default_counts(capsys, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_LOG_LEVEL", "loud")
    with pytest.warns(RuntimeWarning, match="STRATAGEM_LOG_LEVEL: 'loud' is not a log level"):
        assert shown_levels(capsys) == ["warning", "error"]


@pytest.mark.parametrize("asked", [None, "info"])
def test_program_s_own_handlers_take_the_records(capsys, monkeypatch, asked) -> None:
    become(monkeypatch, "worker", 0)
    own = io.StringIO()
    with root_handlers(logging.StreamHandler(own)):
        sg.config.show_logs(asked)
        LOGGER.info("progress")  # the root's level is WARNING
        LOGGER.warning("problem")
    shown = ["problem"] if asked is None else ["progress", "problem"]
    assert own.getvalue().splitlines() == shown
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["stratagem", LOGGER.name])
def test_level_that_the_program_sets_counts(capsys, monkeypatch, name) -> None:
    own, logger = io.StringIO(), logging.getLogger(name)
    monkeypatch.setattr(logger, "level", logger.level)
    logger.setLevel(logging.INFO)
    with root_handlers(logging.StreamHandler(own)):
        LOGGER.debug("detail")
        LOGGER.info("progress")
    assert own.getvalue() == "progress\n"
    assert shown_levels(capsys) == ["info", "warning", "error"]
    logger.setLevel(logging.ERROR)
    assert shown_levels(capsys) == ["error"]
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("is_at_root", [False, True])
def test_handler_of_the_program_at_our_logger_replaces_ours(capsys, is_at_root) -> None:
    own = io.StringIO()
    handler = logging.StreamHandler(own)
    handler.setLevel(logging.ERROR)
    with root_handlers(*([handler] if is_at_root else [])):
        ROOT.addHandler(handler)
        LOGGER.warning("is warning")  # the handler's level counts
        LOGGER.error("is error")  # once
    assert own.getvalue() == "is error\n"
    assert capsys.readouterr().err == ""


def test_warning_that_all_would_give_is_shown_by_one(monkeypatch) -> None:
    for index, count in ((0, 1), (1, 0)):
        become(monkeypatch, "worker", index)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logs.warn_on_one_worker("alike", RuntimeWarning, stacklevel=1)
        assert [str(one.message) for one in caught] == ["alike"] * count
        assert all(one.filename == __file__ for one in caught)
    logs.set_task("chief 0", 0)
    with pytest.warns(UserWarning, match="alike"):
        logs.warn_on_one_worker("alike", stacklevel=1)


def test_status_line_is_printed_as_it_is_or_as_json(capsys) -> None:
    with root_handlers():
        logs.announce(LOGGER, "worker 1: waiting")
        sg.config.show_logs(log_format="json")
        logs.announce(LOGGER, "worker 1: 100 %")
        sg.config.show_logs("error")
        logs.announce(LOGGER, "hidden")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "worker 1: waiting"
    assert json.loads(second)["message"] == "worker 1: 100 %"


def test_status_line_goes_to_the_program_s_handlers_if_they_show_progress(capsys) -> None:
    own = io.StringIO()
    with root_handlers(logging.StreamHandler(own)):
        logs.announce(LOGGER, "to stderr")
        sg.config.show_logs("info")
        logs.announce(LOGGER, "to the handler")
    assert own.getvalue() == "to the handler\n"
    assert capsys.readouterr().err == "to stderr\n"


def test_import_shows_nothing_and_leaves_other_loggers_alone() -> None:
    program = (
        "import logging, stratagem\n"
        "logging.getLogger('stratagem.a').info('hidden')\n"
        "assert not logging.getLogger().handlers\n"
        "logging.basicConfig(format='mine: %(message)s')\n"
        "logging.getLogger('stratagem.a').warning('once')\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert (finished.stdout, finished.stderr) == ("", "mine: once\n")
