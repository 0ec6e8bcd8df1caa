"""JAX is started apart; what it says, and what it leaves unsaid, becomes a finding with a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.cli.doctor.accelerators import (
    Probe,
    check_devices,
    check_gpu_driver,
    check_nccl,
    counted_devices,
    gpu_driver,
    probe_devices,
)
from stratagem.cli.doctor.settings import Level

_CPU = {"platform": "cpu", "kind": "cpu", "process": 0, "memory_bytes": None}
_GPU = {"platform": "gpu", "kind": "NVIDIA H100", "process": 0, "memory_bytes": 2**36}
_PLUGIN = {"jax-cuda12-plugin": "0.10.2", "jaxlib": "0.10.2"}


@pytest.mark.slow
def test_devices_of_this_machine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    probe = probe_devices()
    assert [device["platform"] for device in probe.devices] == ["cpu"] * 3
    (finding,) = check_devices(probe, {}, has_gpu=False)
    assert (finding.level, finding.text) == (Level.OK, "JAX sees 3 x cpu.")


@pytest.mark.slow
def test_unknown_xla_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_make_it_fast=true")
    (finding,) = check_devices(probe_devices(), {}, has_gpu=False)
    assert finding.level is Level.ERROR
    assert "--xla_make_it_fast=true" in finding.text
    assert "remove them from XLA_FLAGS" in finding.fix


@pytest.mark.slow
def test_unknown_platform_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    (finding,) = check_devices(probe_devices(), {}, has_gpu=False)
    assert finding.level is Level.ERROR
    assert "abacus" in finding.text
    assert finding.fix.startswith("correct JAX_PLATFORMS")


_ERRORS = {
    "value": (
        "E1125 17:32:42.656033     469 command_line_flags.cc:93] Couldn't interpret value maybe "
        "for flag xla_a.\nF1125 17:32:42.658232 469 x.cc:220] Check failed\nFlags:\n--xla_a\n--",
        "Couldn't interpret value maybe for flag xla_a.",
        "correct this flag in XLA_FLAGS",
    ),
    "file": (
        'F1125 17:31:22.2  29811 parse_flags_from_env.cc:171] Could not open file "a" to read '
        'flags for environment variable "XLA_FLAGS".',
        'Could not open file "a" to read flags',
        "begin each flag in XLA_FLAGS with --",
    ),
    "variable": (
        "Traceback (most recent call last):\n  ...\nValueError: invalid truth value 'maybe' for "
        "environment 'JAX_ENABLE_X64'\n",
        "ValueError: invalid truth value",
        "correct or unset that variable",
    ),
    "silence": ("", "no output", "for the whole error"),
}


@pytest.mark.parametrize("name", _ERRORS)
def test_reason_is_the_line_of_the_error(name: str) -> None:
    errors, text, fix = _ERRORS[name]
    (finding,) = check_devices(Probe(errors=errors), {}, has_gpu=False)
    assert finding.text.startswith(f"JAX did not start: {text}")
    assert fix in finding.fix


def test_devices_are_counted_by_kind() -> None:
    assert counted_devices([_GPU, _CPU, _GPU]) == ["2 x NVIDIA H100 (gpu)", "1 x cpu"]


def test_start_that_takes_too_long_is_an_error() -> None:
    (finding,) = check_devices(probe_devices(limit_s=0.01), {}, has_gpu=True)
    assert finding.text == "JAX did not start within 0 s."
    assert "another process that uses the accelerator" in finding.fix


def test_gpu_without_plugin_is_a_warning() -> None:
    _, finding = check_devices(Probe([_CPU]), {}, has_gpu=True)
    assert finding.level is Level.WARNING
    assert finding.fix == "pip install 'stratagem[cuda]'"


def test_gpu_that_the_plugin_refuses_is_a_warning_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    probe = Probe([_CPU], "W0000 CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected\n")
    _, finding = check_devices(probe, _PLUGIN, has_gpu=True)
    assert finding.level is Level.WARNING
    assert "CUDA_ERROR_NO_DEVICE" in finding.text


@pytest.mark.parametrize(
    ("name", "value"), [("CUDA_VISIBLE_DEVICES", ""), ("JAX_PLATFORMS", "cpu")]
)
def test_hidden_gpu_is_a_note(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv(name, value)
    _, finding = check_devices(Probe([_CPU]), _PLUGIN, has_gpu=True)
    assert finding.level is Level.NOTE


def test_driver_is_read_from_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert gpu_driver(file) is None
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    assert gpu_driver(file) == "535.104.05"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    )
    assert gpu_driver(file) == "580.65.06"
    file.write_text("nonsense")
    assert gpu_driver(file) == "unknown"


@pytest.mark.parametrize(
    ("driver", "plugin", "is_error"),
    [
        ("525.60.13", "jax-cuda12-plugin", False),
        ("470.82.01", "jax-cuda12-plugin", True),
        ("535.104.05", "jax-cuda13-plugin", True),
        ("580.65.06", "jax-cuda13-plugin", False),
        ("unknown", "jax-cuda13-plugin", False),
    ],
)
def test_driver_must_know_the_cuda_of_the_plugin(driver: str, plugin: str, is_error: bool) -> None:
    findings = check_gpu_driver(driver, {plugin: "0.10.2"})
    assert any(one.level is Level.ERROR for one in findings) == is_error


def test_machine_without_driver_has_no_finding() -> None:
    assert check_gpu_driver(None, _PLUGIN) == []


@pytest.mark.parametrize(
    ("devices", "installed", "finds_library", "is_error"),
    [
        ([], {"jax-cuda13-plugin": "0.10.2"}, False, True),
        ([_GPU, _GPU], {}, False, True),
        ([_GPU], {"nvidia-nccl-cu12": "2.28"}, False, False),
        ([_GPU], {}, True, False),
        ([_CPU], {}, False, False),
    ],
    ids=["plugin on a driver", "missing", "package", "system library", "no gpu"],
)
def test_missing_nccl_is_an_error(
    devices: list[dict[str, object]],
    installed: dict[str, str],
    finds_library: bool,
    is_error: bool,
) -> None:
    findings = check_nccl(devices, installed, has_driver=True, finds_library=finds_library)
    assert [one.level for one in findings] == [Level.ERROR] * is_error
    if not devices:
        assert check_nccl(devices, installed, has_driver=False, finds_library=False) == []
        assert findings[0].fix.startswith("pip install nvidia-nccl-cu13")
