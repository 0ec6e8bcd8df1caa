"""Program that calls a function: both kinds of pickles, values, errors."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from stratagem.launch.tasks.function_task import CALL, CallResult, main, pack_call, read_result


@pytest.fixture
def call(tmp_path, monkeypatch) -> Callable[..., None]:
    """Runs the program here, for a call pickled by value or by reference."""

    def run(fn: Any, *args: Any, by_value: bool = True, **kwargs: Any) -> None:
        pickled = (cloudpickle if by_value else pickle).dumps((fn, args, kwargs))
        (tmp_path / CALL).write_bytes(pack_call(pickled, by_value=by_value))
        monkeypatch.setattr(sys, "argv", ["program", str(tmp_path), "answer"])
        main()

    return run


def result_in(folder: Path) -> CallResult:
    with (folder / "answer").open("rb") as file:
        return read_result(file)


def test_function_of_the_folder_is_called(call, tmp_path) -> None:
    call(lambda a, b: a - b, 5, b=3)
    assert result_in(tmp_path) == CallResult(value=2)
    call(divmod, 7, 4, by_value=False)
    assert result_in(tmp_path) == CallResult(value=(1, 3))


def test_value_is_pickled_by_value_if_the_call_was(call, tmp_path) -> None:
    call(lambda: lambda number: number + 1)
    assert result_in(tmp_path).value(2) == 3


@pytest.mark.parametrize("by_value", [False, True])
def test_what_it_raises_is_written_and_raised(call, tmp_path, by_value) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        call(int, "x", by_value=by_value)
    result = result_in(tmp_path)
    assert result.value is None
    assert str(result.error) == "invalid literal for int() with base 10: 'x'"
    assert result.traceback[-1].startswith("ValueError: invalid literal")


@pytest.mark.parametrize("by_value", [False, True])
def test_value_that_cannot_be_sent_is_an_error(call, tmp_path, by_value) -> None:
    with pytest.raises(TypeError, match="that cannot be sent back"):
        call(threading.Lock, by_value=by_value)
    assert isinstance(result_in(tmp_path).error, TypeError)
