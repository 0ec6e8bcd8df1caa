"""Devices that JAX finds, and accelerators of the machine that it does not."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem import environment
from stratagem.cli.doctor.findings import Finding, error, note, ok, warning

NCCL_PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_PROBE_LIMIT_S = 120
_PROGRAM = """
import json, jax
print("STRATAGEM_DEVICES", json.dumps([
    {"platform": d.platform, "kind": d.device_kind, "process": d.process_index,
     "memory_bytes": (d.memory_stats() or {}).get("bytes_limit")}
    for d in jax.local_devices()]))
"""
_UNKNOWN_FLAGS = re.compile(r"Unknown flags? in XLA_FLAGS: (?P<flags>.*)")
# Errors of XLA's log: level, date, time, thread, and file.
_LOG_PREFIX = re.compile(r"[EF]\d{4} [\d:.]+ +\d+ (?P<file>\S+)\] ")
_UNKNOWN_FIX = 'run python -c "import jax; print(jax.devices())" for the whole error.'
_START_FIXES = {
    "Couldn't interpret value": "correct this flag in XLA_FLAGS.",
    '"XLA_FLAGS"': "begin each flag in XLA_FLAGS with --.",
    "JAX_PLATFORMS": "correct JAX_PLATFORMS, or unset it; a platform needs its plugin: pip install "
    "'stratagem[cuda]' for GPUs, 'stratagem[tpu]' for TPUs.",
    "for environment": "correct or unset that variable.",
    "for JAX flag": "correct or unset the variable of this name in capitals.",
    "jaxlib": "pip install --upgrade jax jaxlib, both of one version.",
}
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
# Lowest driver by major version of CUDA: NVIDIA's table of minor version compatibility.
_LOWEST_DRIVER = {12: 525, 13: 580}


@dataclasses.dataclass(frozen=True)
class Probe:
    """Result of starting JAX in a process of its own.

    Args:
        devices: local devices; empty if JAX did not start.
        errors: what the process wrote to stderr.
        seconds: limit that was exceeded; None if the process ended.
    """

    devices: Sequence[Mapping[str, Any]] = ()
    errors: str = ""
    seconds: float | None = None


def probe_devices(limit_s: float = _PROBE_LIMIT_S) -> Probe:
    """Starts JAX in a subprocess: a broken driver may end the process or block it."""
    try:
        finished = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env=environment.snapshot(),
        )
    except subprocess.TimeoutExpired as late:
        text = late.stderr or ""  # bytes in most versions of Python, even with text=True
        errors = text.decode(errors="replace") if isinstance(text, bytes) else text
        return Probe(errors=errors, seconds=limit_s)
    for line in finished.stdout.splitlines():
        marker, _, text = line.partition(" ")
        if marker == "STRATAGEM_DEVICES":
            return Probe(json.loads(text), finished.stderr)
    return Probe(errors=finished.stderr)


def gpu_driver(file: Path = _DRIVER_FILE) -> str | None:
    """Returns the version of NVIDIA's kernel driver, or None without one."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)", text)
    return found[1] if found else "unknown"


def check_gpu_driver(driver: str | None, installed: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that the driver is recent enough for the CUDA version of JAX's plugin."""
    if driver is None:
        return
    yield ok(f"NVIDIA driver {driver}.")
    major = driver.partition(".")[0]
    for cuda, lowest in _LOWEST_DRIVER.items():
        if f"jax-cuda{cuda}-plugin" in installed and major.isdecimal() and int(major) < lowest:
            yield error(
                f"The NVIDIA driver is {driver}; CUDA {cuda} needs {lowest} or later.",
                "update the driver, or install the plugin of an earlier CUDA version.",
            )


def check_devices(
    probe: Probe, installed: Mapping[str, str], driver: str | None
) -> Iterator[Finding]:
    """Reports the devices of JAX, and accelerators that it does not use."""
    if (found := _UNKNOWN_FLAGS.search(probe.errors)) is not None:
        yield error(
            f"XLA_FLAGS has flags that this jaxlib does not know: {found['flags'].strip()}",
            "remove them from XLA_FLAGS: XLA ends the process because of them.",
        )
    elif probe.seconds is not None:
        yield error(
            f"JAX did not start within {probe.seconds:.0f} s.",
            "look for another process that uses the accelerator (nvidia-smi; for a TPU, "
            "lsof /dev/accel0 /dev/vfio), or set JAX_PLATFORMS=cpu to leave it alone.",
        )
    elif not probe.devices:
        cause = _cause(probe.errors)
        fix = next((fix for sign, fix in _START_FIXES.items() if sign in cause), _UNKNOWN_FIX)
        yield error(f"JAX did not start: {cause}", fix)
    else:
        yield ok(f"JAX sees {', '.join(counted_devices(probe.devices))}.")
        if driver is not None and not _has_gpu(probe):
            yield _unused_gpu(probe, installed)


def check_nccl(
    probe: Probe, installed: Mapping[str, str], driver: str | None, *, finds_library: bool
) -> Iterator[Finding]:
    """Checks that NCCL exists where there are GPUs, as a package or as a system-wide library."""
    plugins = _plugins(installed)
    has_package = any(name in installed for name in NCCL_PACKAGES)
    if not (_has_gpu(probe) or (driver and plugins)) or has_package or finds_library:
        return
    cuda = re.sub(r"\D", "", plugins[0]) if plugins else "12"
    yield error(
        "NCCL is not installed; GPUs cannot exchange gradients without it.",
        f"pip install nvidia-nccl-cu{cuda}, or install 'stratagem[cuda]' again.",
    )


def counted_devices(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the number of devices of each kind, such as "8 x NVIDIA H100 (gpu)"."""
    kinds = [
        device["kind"]
        if device["kind"] == device["platform"]
        else f"{device['kind']} ({device['platform']})"
        for device in devices
    ]
    return [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]


def _has_gpu(probe: Probe) -> bool:
    return any(device["platform"] == "gpu" for device in probe.devices)


def _plugins(installed: Mapping[str, str]) -> list[str]:
    return [name for name in installed if re.fullmatch(r"jax-cuda\d+-plugin", name)]


def _cause(errors: str) -> str:
    """Returns the line that says why a process ended."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # XLA prints all of its flags after the error, and Python the error after its traceback.
    fatal = [_LOG_PREFIX.sub("", line) for line in lines if _LOG_PREFIX.match(line)]
    return [*fatal[:1], *reversed(lines), "no output"][0][:300]


def _unused_gpu(probe: Probe, installed: Mapping[str, str]) -> Finding:
    if not _plugins(installed):
        text = "The machine has an NVIDIA GPU, but JAX's plugin for it is not installed."
        return warning(text, "pip install 'stratagem[cuda]'")
    if environment.visible_gpus() == () or environment.lookup("JAX_PLATFORMS") == "cpu":
        return note("The GPUs are hidden by CUDA_VISIBLE_DEVICES or JAX_PLATFORMS.")
    lines = [line for line in probe.errors.splitlines() if "CUDA" in line or "cuda" in line]
    return warning(
        f"JAX does not use the NVIDIA GPU: {(lines or ['it gives no reason'])[-1][:300]}",
        "compare the driver with the CUDA version of the plugin, and try nvidia-smi.",
    )
