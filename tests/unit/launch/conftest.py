"""Scripts for tasks, and an environment without cluster, GPU or launcher options."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from stratagem.launch.tasks import output as line_buffer


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch) -> None:
    for name in list(os.environ):
        if name.startswith("STRATAGEM_"):
            monkeypatch.delenv(name)
    # A machine under load may stop a task for a while in the middle of a line.
    monkeypatch.setattr(line_buffer, "PATIENCE_S", 1000.0)
    # Set and empty: no GPU, without asking the driver.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def script(tmp_path) -> Callable[[str], str]:
    """Writes a Python script; it finds its task in `task`, and files in its working folder."""

    def write(text: str, name: str = "task_script.py") -> str:
        path = tmp_path / name
        head = 'import json, os, sys\ntask = json.loads(os.environ["TF_CONFIG"])["task"]\n'
        path.write_text(head + textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder of the tasks."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
