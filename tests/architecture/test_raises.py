"""Every error that the package makes has a test that looks for words of its message."""

from __future__ import annotations

import pytest

from tests.architecture.error_messages import expectations, messages, untested
from tests.architecture.source_tree import REPOSITORY, assert_none, from_text, load, package

# Start of a message: the reason why no test can reach it.
UNREACHABLE: dict[str, str] = {}

SOURCE = """
def check(axis, devices):
    if axis is None:
        raise TypeError(f"axis={axis!r} is of type {type(axis).__name__}, not an int.")
    if axis > 3:
        raise InvalidArgumentError(
            explain(f"axis={axis} is out of range.", expected="-2 <= axis < 2.", fix="pass 0, 1.")
        )
    raise wrong_context("reduce")

def wrong_context(name):
    fix = f"call {name} outside of every replica function."
    return RuntimeError(explain("This is replica context.", expected="cross-replica.", fix=fix))
"""
TESTED = [
    "with pytest.raises(TypeError, match=r'axis=None is of type \\w+, not an int'): ...",
    "with pytest.raises(ValueError, match='is out of range'): ...",
    "with pytest.raises(ValueError, match=re.escape('axis=7 is out of range.')): ...",
    "def test():\n with pytest.raises(RuntimeError) as e: ...\n"
    " assert 'outside of every' in str(e.value)",
    "@pytest.mark.parametrize(('x', 'words'), [(1, 'not an int')])\n"
    "def test(x, words):\n with pytest.raises(TypeError, match=words): ...",
    "TABLE = [(1, 'This is replica context')]\n@pytest.mark.parametrize(('x', 'words'), TABLE)\n"
    "def test(x, words):\n with pytest.raises(RuntimeError, match=words): ...",
]
NOT_TESTED = [
    "with pytest.raises(ValueError, match='not an int'): ...",
    "with pytest.raises(TypeError, match='an int'): ...",
    "with pytest.raises(ValueError, match='.*'): ...",
    "with pytest.raises(TypeError): ...",
    "x = 'This is replica context'",
]


def test_every_error_message_is_looked_for() -> None:
    tests = load(REPOSITORY / "tests", under=REPOSITORY)
    missing = [
        message
        for message in untested(messages(package()), expectations(tests))
        if not any(start in message for start in UNREACHABLE)
    ]
    assert_none(missing)


def test_all_messages_are_found() -> None:
    found = [(message.error, len(message.texts)) for message in messages([from_text(SOURCE)])]
    assert found == [("TypeError", 1), ("InvalidArgumentError", 3), ("RuntimeError", 3)]


@pytest.mark.parametrize("test", TESTED)
def test_message_that_a_test_looks_for_is_accepted(test) -> None:
    assert len(untested(messages([from_text(SOURCE)]), expectations([from_text(test)]))) == 2


@pytest.mark.parametrize("test", NOT_TESTED)
def test_message_that_no_test_looks_for_is_reported(test) -> None:
    assert len(untested(messages([from_text(SOURCE)]), expectations([from_text(test)]))) == 3
