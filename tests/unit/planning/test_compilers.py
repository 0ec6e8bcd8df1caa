"""Selection of the compiler, and its fallbacks."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import jax
import pytest

from stratagem.execution.programs.step_capture import CapturedStep
from stratagem.planning import compilers
from stratagem.planning.compilers import compile_step, missing_compiler
from stratagem.planning.script_capture import capture_script
from stratagem.planning.targets import parse_target

_TARGET = parse_target("2xH100")


@pytest.fixture(scope="module")
def step() -> CapturedStep:
    return capture_script(Path(__file__).parent / "programs" / "loop.py", [], _TARGET)


@pytest.fixture
def has_plugin(monkeypatch) -> None:
    monkeypatch.setattr(compilers, "missing_compiler", lambda platform: None)


def test_plugin_that_is_not_installed_is_named(monkeypatch) -> None:
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    assert missing_compiler("gpu") == "pip install jax-cuda12-pjrt"
    assert missing_compiler("tpu") == "pip install libtpu"


@pytest.mark.parametrize("module", ["jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"])
def test_either_plugin_for_cuda_is_enough(module, monkeypatch) -> None:
    monkeypatch.setattr(
        compilers.importlib.util, "find_spec", lambda name: name if name == module else None
    )
    assert missing_compiler("gpu") is None
    assert missing_compiler("tpu") is not None


@dataclasses.dataclass(frozen=True)
class _AttachedDevice:
    id: int
    device_kind: str


@pytest.mark.parametrize(
    ("kind", "num_attached", "target", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 2, "1xH100", [0]),
        ("NVIDIA H100 80GB HBM3", 2, "2xH100", [0, 1]),
        ("NVIDIA H100 80GB HBM3", 2, "8xH100", []),
        ("NVIDIA H100 80GB HBM3", 16, "16xH100", []),
        ("NVIDIA A100-SXM4-80GB", 8, "1xH100", []),
    ],
)
def test_attached_devices_of_the_kind_compile(
    kind, num_attached, target, expected, monkeypatch
) -> None:
    attached = [_AttachedDevice(index, kind) for index in range(num_attached)]
    monkeypatch.setattr(compilers.jax, "local_devices", lambda: attached)
    found = compilers.attached_devices(parse_target(target))
    assert [device.id for device in found] == expected


def test_step_that_the_compiler_refuses(step, has_plugin, monkeypatch) -> None:
    def refuse(step, target):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: out of memory in memory space hbm.\n"
            "Used 19.45G of 15.75G hbm. Exceeded hbm capacity by 3.70G.\n"
        )

    monkeypatch.setattr(compilers, "_compile_for", refuse)
    compiled = compile_step(step, _TARGET)
    assert (compiled.is_refused, compiled.compiler) == (True, "cpu")
    assert "Used 19.45G of 15.75G hbm" in compiled.notes[0]
    (program,) = compiled.programs
    assert program.memory.argument_bytes > 0


def test_step_that_the_compiler_cannot_do(step, has_plugin, monkeypatch) -> None:
    def fail(step, target):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no library for it\nmore")

    monkeypatch.setattr(compilers, "_compile_for", fail)
    compiled = compile_step(step, _TARGET)
    assert not compiled.is_refused
    assert compiled.notes == (
        "Compiled for CPU: the compiler for GPU failed (UNIMPLEMENTED: no library for it).",
    )


def test_other_process_that_fails_is_reported(step, monkeypatch) -> None:
    def run(command, **options):
        assert options["timeout"]
        return subprocess.CompletedProcess(command, 3, "", "first\nlast words\n")

    monkeypatch.setattr(compilers.jax, "local_devices", lambda backend: [])
    monkeypatch.setattr(compilers.subprocess, "run", run)
    with pytest.raises(RuntimeError, match="The CPU compiler exited with code 3") as told:
        compile_step(step, _TARGET)
    assert "last words" in str(told.value)
