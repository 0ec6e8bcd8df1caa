"""Calls for other processes: what is imported there, what is sent, and what is refused."""

from __future__ import annotations

import io
import linecache
import pickle
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.launch import functions as packing
from stratagem.launch.functions import pack_function_call
from tests.unit.launch import task_functions


def _session(monkeypatch: pytest.MonkeyPatch, source: str, **names: Any) -> types.ModuleType:
    """A `__main__` without a file, like the one of a notebook."""
    session = types.ModuleType("__main__")
    vars(session).update(names)
    monkeypatch.setitem(sys.modules, "__main__", session)
    name = "/nowhere/cell 1"
    lines = source.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, name, (len(source), None, lines, name))
    exec(compile(source, name, "exec"), vars(session))
    return session


def _parts(packed: bytes) -> tuple[dict[str, Any], bytes]:
    file = io.BytesIO(packed)
    return pickle.load(file), file.read()


def test_function_of_a_module_is_imported() -> None:
    header, call = _parts(pack_function_call(task_functions.place, (1,), {"a": 2}))
    assert pickle.loads(call) == (task_functions.place, (1,), {"a": 2})
    assert (header["main_path"], header["by_value"], header["sources"]) == (None, False, {})
    assert header["path"] == sys.path


def test_function_of_a_session_is_sent_with_its_source(monkeypatch) -> None:
    source = "def work(x):\n    return x * factor\n"
    session = _session(monkeypatch, source, factor=np.arange(3))
    header, call = _parts(pack_function_call(session.work, (2,), {}))
    assert (header["main_path"], header["by_value"]) == (None, True)
    assert header["sources"] == {"/nowhere/cell 1": source}
    session.factor = None  # a copy was sent
    work, args, _ = pickle.loads(call)
    assert work(*args).tolist() == [0, 2, 4]


def test_function_in_another_one_is_sent() -> None:
    def inner() -> int:
        return factor

    factor = 3
    header, call = _parts(pack_function_call(inner, (), {}))
    assert header["by_value"]
    factor = 4
    assert pickle.loads(call)[0]() == 3


GUARDED = """
import pathlib, packed
def work():
    pass
if {test}:
    value = packed.pack(work)
else:
    value = packed.pack(work)
later = packed.pack(work)
"""


@pytest.mark.parametrize(
    ("test", "guarded"),
    [
        ('__name__ == "__main__"', True),
        ('"__main__" == __name__ and True', True),
        ("__name__", False),
        ('"__main__"', False),
        ('__name__ != "__main__"', False),
    ],
)
def test_script_is_imported_only_from_its_guard(monkeypatch, tmp_path, test, guarded) -> None:
    script = tmp_path / "main.py"
    script.write_text(GUARDED.format(test=test))
    helper = types.ModuleType("packed")
    helper.pack = lambda fn: _parts(pack_function_call(fn, (), {}))[0]["main_path"]  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "packed", helper)
    names = runpy.run_path(str(script), run_name="__main__")
    assert names["value"] == (str(script.resolve()) if guarded else None)
    assert names["later"] is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: sg.OneDeviceStrategy("cpu:0"),
            "Variable 'thing' of work, of type OneDeviceStrategy, cannot be sent"
            "(?s:.)*inside the function: strategy = sg.MultiWorkerMirroredStrategy",
        ),
        (
            lambda: keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]),
            "Variable 'thing' of .*, of type Sequential, cannot(?s:.)*model.get_weights()",
        ),
        (
            lambda: [1, {"file": sys.stdout}],
            r"Variable 'thing'\[1\]\['file'\] of .*(?s:.)*create the object inside the function",
        ),
    ],
    ids=["strategy", "model", "file"],
)
def test_captured_object_of_this_process_is_named_with_the_fix(monkeypatch, make, words) -> None:
    session = _session(monkeypatch, "def work():\n    return thing\n", thing=make())
    with pytest.raises(TypeError, match=words):
        pack_function_call(session.work, (), {})


def test_script_that_cannot_be_read_has_no_guard(tmp_path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("if __name__ ==")
    assert packing._guards(broken) == packing._guards(Path("missing.py")) == []
