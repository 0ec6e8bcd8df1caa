"""JAX is started apart; what it says, and what it leaves unsaid, becomes a finding with a fix."""

from __future__ import annotations

import dataclasses
import os
import resource
from pathlib import Path

import pytest

from stratagem.cli.doctor import machine
from stratagem.cli.doctor.cluster import examine_clusters
from stratagem.cli.doctor.findings import Level
from stratagem.cli.doctor.machine import (
    Limits,
    Probe,
    check_devices,
    check_gpu_driver,
    check_machine,
    check_nccl,
    check_versions,
    examine,
    gpu_driver,
    installed_versions,
    probe_devices,
    read_limits,
    variables_of_user,
)
from tests.unit.cli.doctor.environments import install

_CPU = {"platform": "cpu", "kind": "cpu", "process": 0, "memory_bytes": None}
_GPU = {"platform": "gpu", "kind": "NVIDIA H100", "process": 0, "memory_bytes": 2**36}
_PLUGIN = {"jax-cuda12-plugin": "0.10.2", "jaxlib": "0.10.2"}
_FLAG = "--xla_make_it_fast=true"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "level", "text", "fix"),
    [
        ({"JAX_NUM_CPU_DEVICES": "3"}, Level.OK, "JAX sees 3 x cpu.", ""),
        ({"XLA_FLAGS": _FLAG}, Level.ERROR, _FLAG, "remove them from XLA_FLAGS"),
        ({"JAX_PLATFORMS": "abacus"}, Level.ERROR, "abacus", "correct JAX_PLATFORMS"),
    ],
    ids=["devices", "unknown flag", "unknown platform"],
)
def test_start_of_jax_is_judged(variables, level, text, fix, monkeypatch) -> None:
    for name, value in ({"JAX_PLATFORMS": "cpu"} | variables).items():
        monkeypatch.setenv(name, value)
    (finding,) = check_devices(probe_devices(), {}, None)
    assert finding.level is level
    assert text in finding.text
    assert fix in finding.fix


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
    (finding,) = check_devices(Probe(errors=errors), {}, None)
    assert finding.text.startswith(f"JAX did not start: {text}")
    assert fix in finding.fix


def test_start_that_takes_too_long_is_an_error() -> None:
    (finding,) = check_devices(probe_devices(limit_s=0.01), {}, "535")
    assert finding.text == "JAX did not start within 0 s."
    assert "another process that uses the accelerator" in finding.fix


_NO_DEVICE = "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"


@pytest.mark.parametrize(
    ("installed", "variables", "level", "text"),
    [
        ({}, {}, Level.WARNING, "JAX's plugin for it is not installed"),
        (_PLUGIN, {}, Level.WARNING, _NO_DEVICE),
        (_PLUGIN, {"CUDA_VISIBLE_DEVICES": ""}, Level.NOTE, "hidden by CUDA_VISIBLE_DEVICES"),
        (_PLUGIN, {"JAX_PLATFORMS": "cpu"}, Level.NOTE, "hidden by CUDA_VISIBLE_DEVICES"),
    ],
    ids=["no plugin", "refused", "hidden", "other platform"],
)
def test_gpu_that_jax_does_not_use_is_named(installed, variables, level, text, monkeypatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen, finding = check_devices(Probe([_CPU], f"W0000 {_NO_DEVICE}\n"), installed, "535")
    assert seen.text == "JAX sees 1 x cpu."
    assert (finding.level, text in finding.text) == (level, True)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (None, None),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC\n"
            "GCC version:  gcc version 12.2.0\n",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
            "580.65.06",
        ),
        ("nonsense", "unknown"),
    ],
)
def test_driver_is_read_from_the_kernel(tmp_path: Path, text, version) -> None:
    if text is not None:
        (tmp_path / "version").write_text(text)
    assert gpu_driver(tmp_path / "version") == version


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
def test_missing_nccl_is_an_error(devices, installed, finds_library, is_error) -> None:
    probe = Probe(devices)
    findings = list(check_nccl(probe, installed, "535", finds_library=finds_library))
    assert [one.level for one in findings] == [Level.ERROR] * is_error
    if not devices:
        assert not list(check_nccl(probe, installed, None, finds_library=False))
        assert findings[0].fix.startswith("pip install nvidia-nccl-cu13")


# Caches.


def test_cache_folder_that_is_a_file_cannot_be_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_CACHE_DIR", str(tmp_path / "made later" / "cache"))
    name = "JAX_COMPILATION_CACHE_DIR"
    assert not list(machine.check_caches({name: "gs://bucket/cache"}))
    (tmp_path / "file").write_bytes(b"x")
    (finding,) = machine.check_caches({name: str(tmp_path / "file" / "programs")})
    assert f"{name} cannot be written: {tmp_path / 'file'} is a file" in finding.text
    monkeypatch.setenv("STRATAGEM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (finding,) = machine.check_caches({})
    assert "set STRATAGEM_CACHE_DIR to a folder" in finding.fix


# Limits that are too low, on made-up machines; and those of this one, against the system's own.

_GOOD = Limits(
    num_cores=8,
    num_machine_cores=8,
    memory_bytes=2**36,
    shm_bytes=2**33,
    max_open_files=65536,
    free_bytes={"/data": 2**40},
)


def test_good_machine_has_no_problem() -> None:
    (finding,) = check_machine(_GOOD)
    assert finding.text == (
        "8 of 8 cores, 64.0 GiB of memory, 8.0 GiB of shared memory, 65536 open files."
    )
    unknown = dataclasses.replace(_GOOD, shm_bytes=None, max_open_files=-1)
    assert len(list(check_machine(unknown))) == 1


@pytest.mark.parametrize(
    ("changed", "level", "text", "fix"),
    [
        ({"free_files": {"/data": 12}}, Level.ERROR, "room for 12 more files", "df -i"),
        ({"shm_bytes": 64 * 2**20}, Level.WARNING, "/dev/shm has 64.0 MiB", "--shm-size"),
        ({"max_open_files": 1024}, Level.WARNING, "may open 1024 files", "ulimit -n 65536"),
        (
            {"free_bytes": {"/data": 5 * 2**30}},
            Level.WARNING,
            "/data has 5.0 GiB free",
            "elsewhere",
        ),
        ({"free_bytes": {"/data": 2**20}}, Level.ERROR, "/data has 1.0 MiB free", "elsewhere"),
    ],
    ids=["inodes", "small shm", "few files", "little disk", "full disk"],
)
def test_low_limit_is_named_with_its_fix(changed, level, text, fix) -> None:
    _, finding = check_machine(dataclasses.replace(_GOOD, **changed))
    assert finding.level is level
    assert text in finding.text
    assert fix in finding.fix


def test_limits_of_the_container_count(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**28}\n")
    limits = read_limits(tmp_path)
    assert (limits.num_cores, limits.memory_bytes) == (0.5, 2**28)


def test_without_container_the_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    limits = read_limits(tmp_path)
    assert limits.num_cores == len(os.sched_getaffinity(0))
    assert limits.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limits.max_open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    status = os.statvfs(os.getcwd())
    assert limits.free_bytes[os.getcwd()] == pytest.approx(
        status.f_bavail * status.f_frsize, rel=0.2
    )


def test_each_file_system_is_examined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setenv("STRATAGEM_RUN_DIR", "/dev/shm")
    monkeypatch.chdir(tmp_path)
    free = read_limits().free_bytes
    assert len({os.stat(folder).st_dev for folder in free}) == len(free)
    assert str(tmp_path) in free
    assert str(tmp_path / "missing") not in free
    assert os.stat("/dev/shm").st_dev in {os.stat(folder).st_dev for folder in free}


# The whole examination of this machine, and its order.

_PROBE = Probe([{"platform": "cpu", "kind": "cpu", "process": 0, "memory_bytes": None}])


def test_every_topic_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setenv("TF_CONFIG", "{")
    findings = list(examine(_PROBE, examine_clusters))
    topics = list(dict.fromkeys(one.topic for one in findings))
    assert topics == ["versions", "settings", "machine", "devices", "cluster"]
    assert {"settings", "cluster"} <= {one.topic for one in findings if one.level is Level.ERROR}
    assert not any(one.topic == "cluster" for one in examine(_PROBE))


def test_plugin_for_another_jaxlib_is_an_error() -> None:
    (_, problem) = check_versions({"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.1"})
    assert problem.level is Level.ERROR
    assert problem.fix == 'pip install "jax-cuda12-plugin==0.10.2"'
    (shown,) = check_versions(_PLUGIN)
    assert "jaxlib 0.10.2" in shown.text


def test_nightly_package_is_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path, "no-such-thing-nightly", "0.1.dev1")))
    assert installed_versions(["no-such-thing"]) == {"no-such-thing": "0.1.dev1"}


@pytest.mark.parametrize(
    ("initial", "backend", "expected"),
    [
        (b"PATH=/bin\0", "jax", None),
        (b"PATH=/bin\0KERAS_BACKEND=jax\0", "jax", "jax"),
        (b"PATH=/bin\0", "torch", "torch"),
    ],
    ids=["selected by the import", "selected by the user", "set later"],
)
def test_backend_of_the_import_is_not_the_users(
    initial, backend, expected, tmp_path, monkeypatch
) -> None:
    (tmp_path / "environ").write_bytes(initial)
    monkeypatch.setattr(machine, "_INITIAL_VARIABLES", tmp_path / "environ")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    assert variables_of_user().get("KERAS_BACKEND") == expected
