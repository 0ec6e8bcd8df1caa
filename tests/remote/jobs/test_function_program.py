"""The program that calls a function which was sent."""

from __future__ import annotations

import threading

import pytest

from stratagem.remote.jobs.function_program import main
from stratagem.remote.jobs.pickling import CALL, dump, load_pickled


def test_function_of_the_folder_is_called(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / CALL).write_bytes(dump((lambda a, b: a - b, (5,), {"b": 3})))
    main(str(tmp_path / "answer"))
    assert load_pickled((tmp_path / "answer").read_bytes()) == (2, None, ())


def test_what_it_raises_is_written_and_raised(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / CALL).write_bytes(dump((int, ("x",), {})))
    with pytest.raises(ValueError, match="invalid literal"):
        main(str(tmp_path / "answer"))
    value, error, lines = load_pickled((tmp_path / "answer").read_bytes())
    assert (value, str(error)) == (None, "invalid literal for int() with base 10: 'x'")
    assert lines[-1].startswith("ValueError: invalid literal")


def test_value_that_cannot_be_sent_is_an_error(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / CALL).write_bytes(dump((threading.Lock, (), {})))
    with pytest.raises(TypeError, match="that cannot be sent to the client"):
        main(str(tmp_path / "answer"))
    assert isinstance(load_pickled((tmp_path / "answer").read_bytes())[1], TypeError)
