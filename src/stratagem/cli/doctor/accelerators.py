"""Devices that JAX finds, and accelerators of the machine that it does not."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem import environment
from stratagem.cli.doctor.findings import Finding, Level

_TOPIC = "devices"
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
    except subprocess.TimeoutExpired as error:
        return Probe(errors=_decoded(error.stderr), seconds=limit_s)
    for line in finished.stdout.splitlines():
        marker, _, text = line.partition(" ")
        if marker == "STRATAGEM_DEVICES":
            return Probe(json.loads(text), finished.stderr)
    return Probe(errors=finished.stderr)


def check_devices(probe: Probe, installed: Mapping[str, str], *, has_gpu: bool) -> list[Finding]:
    """Reports the devices of JAX, and accelerators that it does not use.

    Args:
        probe: what JAX found.
        installed: versions by package.
        has_gpu: True if the machine has an NVIDIA driver.
    """
    if (found := _UNKNOWN_FLAGS.search(probe.errors)) is not None:
        return [
            Finding(
                _TOPIC,
                Level.ERROR,
                f"XLA_FLAGS has flags that this jaxlib does not know: {found['flags'].strip()}",
                "remove them from XLA_FLAGS: XLA ends the process because of them.",
            )
        ]
    if not probe.devices:
        return [_no_devices(probe)]
    platforms = {device["platform"] for device in probe.devices}
    counts = ", ".join(counted_devices(probe.devices))
    findings = [Finding(_TOPIC, Level.OK, f"JAX sees {counts}.")]
    if has_gpu and "gpu" not in platforms:
        findings.append(_unused_gpu(probe, installed))
    return findings


def gpu_driver(file: Path = _DRIVER_FILE) -> str | None:
    """Returns the version of NVIDIA's kernel driver, or None without one."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)", text)
    return found[1] if found else "unknown"


def check_gpu_driver(driver: str | None, installed: Mapping[str, str]) -> list[Finding]:
    """Checks that the driver is recent enough for the CUDA version of JAX's plugin."""
    if driver is None:
        return []
    findings = [Finding(_TOPIC, Level.OK, f"NVIDIA driver {driver}.")]
    major = driver.partition(".")[0]
    for cuda, lowest in _LOWEST_DRIVER.items():
        if f"jax-cuda{cuda}-plugin" in installed and major.isdecimal() and int(major) < lowest:
            findings.append(
                Finding(
                    _TOPIC,
                    Level.ERROR,
                    f"The NVIDIA driver is {driver}; CUDA {cuda} needs {lowest} or later.",
                    "update the driver, or install the plugin of an earlier CUDA version.",
                )
            )
    return findings


def check_nccl(
    devices: Sequence[Mapping[str, Any]],
    installed: Mapping[str, str],
    *,
    has_driver: bool,
    finds_library: bool,
) -> list[Finding]:
    """Checks that NCCL exists where there are GPUs.

    Args:
        devices: of the probe.
        installed: versions by package.
        has_driver: True if the machine has an NVIDIA driver.
        finds_library: True if the loader finds a system-wide libnccl.
    """
    plugins = [name for name in installed if re.fullmatch(r"jax-cuda\d+-plugin", name)]
    has_gpus = any(device["platform"] == "gpu" for device in devices) or (has_driver and plugins)
    has_package = any(name in installed for name in NCCL_PACKAGES)
    if not has_gpus or has_package or finds_library:
        return []
    return [
        Finding(
            _TOPIC,
            Level.ERROR,
            "NCCL is not installed; GPUs cannot exchange gradients without it.",
            f"pip install nvidia-nccl-cu{_cuda_version(plugins)}, or install 'stratagem[cuda]' "
            "again.",
        )
    ]


def counted_devices(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the number of devices of each kind, such as "8 x NVIDIA H100 (gpu)"."""
    kinds = [
        device["kind"]
        if device["kind"] == device["platform"]
        else f"{device['kind']} ({device['platform']})"
        for device in devices
    ]
    return [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]


def _cuda_version(plugins: Sequence[str]) -> str:
    found = re.search(r"\d+", plugins[0]) if plugins else None
    return found[0] if found else "12"


def _no_devices(probe: Probe) -> Finding:
    if probe.seconds is not None:
        return Finding(
            _TOPIC,
            Level.ERROR,
            f"JAX did not start within {probe.seconds:.0f} s.",
            "look for another process that uses the accelerator (nvidia-smi; for a TPU, "
            "lsof /dev/accel0 /dev/vfio), or set JAX_PLATFORMS=cpu to leave it alone.",
        )
    return Finding(
        _TOPIC,
        Level.ERROR,
        f"JAX did not start: {(cause := _cause(probe.errors))}",
        next((fix for sign, fix in _START_FIXES.items() if sign in cause), _UNKNOWN_FIX),
    )


def _cause(errors: str) -> str:
    """Returns the line that says why a process ended."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # XLA prints all of its flags after the error, and Python the error after its traceback.
    fatal = [_LOG_PREFIX.sub("", line) for line in lines if _LOG_PREFIX.match(line)]
    return [*fatal[:1], *reversed(lines), "no output"][0][:300]


def _unused_gpu(probe: Probe, installed: Mapping[str, str]) -> Finding:
    if not any(name.startswith("jax-cuda") and name.endswith("plugin") for name in installed):
        return Finding(
            _TOPIC,
            Level.WARNING,
            "The machine has an NVIDIA GPU, but JAX's plugin for it is not installed.",
            "pip install 'stratagem[cuda]'",
        )
    hidden = environment.visible_gpus() == () or environment.lookup("JAX_PLATFORMS") == "cpu"
    if hidden:
        return Finding(
            _TOPIC,
            Level.NOTE,
            "The GPUs are hidden by CUDA_VISIBLE_DEVICES or JAX_PLATFORMS.",
        )
    lines = [line for line in probe.errors.splitlines() if "CUDA" in line or "cuda" in line]
    return Finding(
        _TOPIC,
        Level.WARNING,
        f"JAX does not use the NVIDIA GPU: {(lines or ['it gives no reason'])[-1][:300]}",
        "compare the driver with the CUDA version of the plugin, and try nvidia-smi.",
    )


def _decoded(text: bytes | str | None) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text or ""
