"""`spawn` in a kernel of a real Jupyter server: output, errors, the stop button, shutdown.

`NOTEBOOK_PYTHON` names an interpreter that has `jupyter_server` and `ipykernel`, and the package's
own requirements. Without it, the interpreter of the tests and the one of `make docs` are tried.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[4]
_PROGRAM = Path(__file__).with_name("server_session.py")
_NEEDED = "import jupyter_server, ipykernel, jax, keras, cloudpickle"

pytestmark = pytest.mark.slow


def _interpreter() -> str | None:
    named = os.environ.get("NOTEBOOK_PYTHON")
    candidates = (
        [named] if named else [sys.executable, str(_ROOT / ".venv-docs" / "bin" / "python")]
    )
    for python in candidates:
        if Path(python).exists():
            ended = subprocess.run([python, "-c", _NEEDED], capture_output=True, check=False)
            if ended.returncode == 0:
                return python
    return None


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    python = _interpreter()
    if python is None:
        pytest.skip("no interpreter has jupyter_server and ipykernel: set NOTEBOOK_PYTHON")
    folder = tmp_path_factory.mktemp("notebook")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{_ROOT}/src:{_ROOT}",
        "IPYTHONDIR": str(folder / "ip"),
    }
    ended = subprocess.run(
        [python, _PROGRAM, folder],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def _text(outputs: list[dict[str, Any]], name: str) -> str:
    return "".join(
        one["text"] for one in outputs if one["kind"] == "stream" and one["name"] == name
    )


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_value_and_lines_of_a_cell(session) -> None:
    outputs = session["work"]
    assert session["begin"] == []
    (result,) = [one for one in outputs if one["kind"] == "execute_result"]
    assert result["data"]["text/plain"] == "[0, 3]"
    lines = _plain(_text(outputs, "stdout")).splitlines()
    assert sorted(lines) == ["[worker 0] done", "[worker 1] done"]


def test_bar_is_updated_in_one_display_and_removed(session) -> None:
    outputs = session["work"]
    (display,) = [one for one in outputs if one["kind"] == "display_data"]
    updates = [one for one in outputs if one["kind"] == "update_display_data"]
    identity = display["transient"]["display_id"]
    assert updates
    assert {one["transient"]["display_id"] for one in updates} == {identity}
    assert re.search(r"^\[worker \d\] \d+ of 30$", display["data"]["text/plain"], re.MULTILINE)
    assert updates[-1]["data"]["text/plain"] == ""


def test_nothing_but_colors_controls_the_output(session) -> None:
    for name in ("work", "fail", "interrupted"):
        for stream in ("stdout", "stderr"):
            text = _plain(_text(session[name], stream))
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text), repr(text)


def test_error_of_a_worker_has_the_line_of_its_cell(session) -> None:
    (error,) = [one for one in session["fail"] if one["kind"] == "error"]
    assert (error["ename"], error["evalue"]) == ("KeyError", "'no such key'")
    trace = _plain("\n".join(error["traceback"]))
    assert "RemoteError" in trace
    assert 'return missing["no such key"]  # here' in trace
    assert 'return missing["no such key"]  # here' in _plain(_text(session["fail"], "stderr"))


def test_stop_button_ends_the_workers_and_the_kernel_goes_on(session) -> None:
    (error,) = [one for one in session["interrupted"] if one["kind"] == "error"]
    assert error["ename"] == "KeyboardInterrupt"
    assert session["gone_after_interrupt"]
    stderr = _plain(_text(session["interrupted"], "stderr"))
    assert "[launch] SIGINT: waiting for the tasks to end." in stderr
    assert "Traceback" not in stderr  # of workers, which say nothing about the program
    (result,) = [one for one in session["after"] if one["kind"] == "execute_result"]
    assert result["data"]["text/plain"] == "4"


def test_shutdown_of_the_kernel_leaves_no_worker(session) -> None:
    assert session["gone_after_shutdown"]
