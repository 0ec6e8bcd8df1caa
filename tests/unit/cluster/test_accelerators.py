"""Local GPUs, counted without a backend."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stratagem.cluster import accelerators
from stratagem.cluster.accelerators import local_gpus


def _command(monkeypatch, program: str) -> None:
    monkeypatch.setattr(accelerators, "_COMMAND", (sys.executable, "-c", program))


def test_gpus_are_listed_by_the_driver_s_tool(monkeypatch) -> None:
    _command(monkeypatch, "print('GPU 0: A (UUID: x)\\n  MIG 1g\\nGPU 1: A (UUID: y)')")
    assert local_gpus() == ("0", "1")


def test_machine_without_the_tool_has_none(monkeypatch) -> None:
    monkeypatch.setattr(accelerators, "_COMMAND", ("no-such-command-here",))
    assert local_gpus() == ()


@pytest.mark.parametrize(
    "program", ["print('driver is broken'); raise SystemExit(9)", "import time; time.sleep(60)"]
)
def test_tool_that_fails_is_an_error(monkeypatch, program) -> None:
    _command(monkeypatch, program)
    monkeypatch.setattr(accelerators, "_TIMEOUT_S", 1)
    with pytest.raises(
        RuntimeError, match=r"failed: Command(?s:.)*a list of this host's GPUs"
    ) as e:
        local_gpus()
    assert isinstance(e.value.__cause__, subprocess.SubprocessError)
