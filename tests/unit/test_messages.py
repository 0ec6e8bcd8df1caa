"""The format of error messages."""

from __future__ import annotations

import pytest

from stratagem.errors import explain


def test_message_has_three_lines() -> None:
    message = explain("axis=3 is out of range.", expected="-2 <= axis < 2.", fix="pass 0.")
    assert message == "axis=3 is out of range.\nExpected -2 <= axis < 2.\nFix: pass 0."


def test_code_is_a_fourth_line_with_the_command() -> None:
    message = explain("No batch.", expected="one.", fix="repeat the data.", code="SG304")
    assert message == (
        "No batch.\nExpected one.\nFix: repeat the data.\nHelp: stratagem explain SG304"
    )


@pytest.mark.parametrize("parts", [{}, {"expected": "more."}, {"fix": "give more."}], ids=repr)
def test_no_part_can_be_left_out(parts) -> None:
    with pytest.raises(TypeError, match=r"missing .* required keyword-only argument"):
        explain("Nothing.", **parts)
