"""The list of Keras's own tests that differ under a strategy, held against made-up outcomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from validation.keras_own.differences import UNEXPLAINED, compare, read, recorded, write

_PLAIN = {"same": "passed", "torn": "passed", "lost": "passed", "no_tf": "failed", "tf": "skipped"}
_OUTCOMES = {"same": "passed", "torn": "failed", "no_tf": "failed", "tf": "skipped"}
_REASONS = {
    ("mirrored", "torn"): "two devices",
    ("mirrored", "lost"): "no room",
    ("tpu", "same"): "?",
}


def test_listed_differences_are_as_listed() -> None:
    comparison = compare("mirrored", _PLAIN, _OUTCOMES, _REASONS)
    assert comparison.is_as_listed
    assert comparison.summary("mirrored") == (
        "mirrored: 1 passed, 0 failed, 1 skipped; 2 differ as listed, 1 fail in plain Keras as well"
    )


@pytest.mark.parametrize("outcome", ["failed", "skipped", None])
def test_new_difference_fails(outcome: str | None) -> None:
    outcomes = {**_OUTCOMES, "same": outcome} if outcome else {"torn": "failed"}
    comparison = compare("mirrored", _PLAIN, outcomes, _REASONS)
    assert comparison.new == ["same"]
    assert not comparison.is_as_listed


def test_difference_without_a_reason_fails() -> None:
    reasons = {**_REASONS, ("mirrored", "torn"): UNEXPLAINED}
    comparison = compare("mirrored", _PLAIN, _OUTCOMES, reasons)
    assert comparison.new == ["torn"]
    assert "1 failed" in comparison.summary("mirrored")


@pytest.mark.parametrize("plain", ["passed", "failed"])
def test_listed_test_that_does_not_differ_any_more_fails(plain: str) -> None:
    plain_outcomes = {**_PLAIN, "torn": plain}
    outcomes = {**_OUTCOMES, "torn": plain}
    comparison = compare("mirrored", plain_outcomes, outcomes, _REASONS)
    assert comparison.mended == ["torn"]
    assert not comparison.is_as_listed


def test_recorded_list_keeps_reasons_and_has_none_for_new_differences() -> None:
    outcomes = {**_OUTCOMES, "same": "failed", "torn": "passed"}
    comparison = compare("mirrored", _PLAIN, outcomes, _REASONS)
    assert recorded(_REASONS, {"mirrored": comparison}) == {
        ("mirrored", "lost"): "no room",
        ("mirrored", "same"): UNEXPLAINED,
        ("tpu", "same"): "?",
    }


def test_written_list_is_read_again() -> None:
    reasons = {
        (strategy, test): reason
        for strategy in ("central", "mirrored")
        for test, reason in (("a.py::T::b[\\]", 'says "no"'), ("c.py::d", "é"))
    }
    text = write({**reasons, ("tpu", "c.py::d"): "é"})
    assert text.count("[[difference]]") == 2
    assert read(text) == {**reasons, ("tpu", "c.py::d"): "é"}


def test_test_that_is_listed_twice_is_refused() -> None:
    entry = '[[difference]]\nreason = "{}"\nstrategies = ["tpu"]\ntests = ["a"]\n'
    with pytest.raises(ValueError, match="a is listed twice for tpu"):
        read(entry.format("one") + entry.format("two"))


def test_list_in_the_repository_gives_each_test_a_reason() -> None:
    path = Path(__file__).parent / "differences.toml"
    text = path.read_text(encoding="utf-8")
    reasons = read(text)
    assert reasons
    assert UNEXPLAINED not in reasons.values()
    assert text == write(reasons)
