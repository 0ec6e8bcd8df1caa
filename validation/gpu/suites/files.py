"""Test files in the order in which a limited run takes them, and what a GPU cannot run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[3]

# The most telling first. What starts clusters, Ray or Kubernetes, or uses no device, is not here.
SUITES: dict[str, tuple[str, ...]] = {
    "strategies": ("tests/unit/strategies",),
    "contract": ("tests/contract",),
    "numerics": ("tests/unit/keras/numerics", "tests/unit/keras/evaluation"),
    "parity": ("tests/parity",),
    "training": (
        "tests/unit/keras/training",
        "tests/unit/keras/variables",
        "tests/unit/keras/test_keras.py",
    ),
    "programs": ("tests/unit/execution",),
    "variables": ("tests/unit/variables",),
    "checkpoint": ("tests/unit/checkpoint",),
    "callbacks": ("tests/unit/keras/callbacks",),
    "profiling": (
        "tests/unit/observe/test_profiling.py",
        "tests/unit/observe/test_recorder.py",
        "tests/unit/execution/summary",
    ),
    "estimator": (
        "tests/unit/estimator/test_steps.py",
        "tests/unit/estimator/test_estimator.py",
        "tests/unit/estimator/test_loops.py",
        "tests/unit/estimator/test_training.py",
        "tests/unit/estimator/test_training_role.py",
        "tests/unit/estimator/test_keras_models.py",
        "tests/unit/estimator/test_export.py",
        "tests/unit/estimator/test_heads.py",
        "tests/unit/estimator/test_premade.py",
        "tests/unit/estimator/test_feature_column.py",
    ),
    "input": ("tests/unit/input",),
    "collectives": ("tests/unit/devices/collectives",),
    "machine": (
        "tests/unit/cli/doctor/test_machine.py",
        "tests/unit/cli/doctor/test_settings.py",
        "tests/unit/cli/test_machine_commands.py",
        "tests/unit/cli/test_other_commands.py",
        "tests/unit/cli/doctor/test_selftest.py",
        "tests/unit/cluster/test_accelerators.py",
        "tests/unit/test_environment.py",
        "tests/unit/test_public_names.py",
        "tests/unit/devices/topology",
    ),
    "servers": (
        "tests/unit/parameter_server/keras",
        "tests/unit/parameter_server/client",
        "tests/unit/parameter_server/strategy",
    ),
    "planning": ("tests/unit/planning",),
}

# Start of a test's id, and why it says nothing with a GPU in the place of the CPU.
_BY_NUMBER = "numbers count the CPU devices of the default platform; with a GPU there is one device"
_MIRRORED = "tests/unit/strategies/test_mirrored.py::"
NOT_FOR_A_GPU: dict[str, str] = {
    f"{_MIRRORED}test_mirrored_takes_devices_by_name_index_or_as_they_are[[1, 3]]": _BY_NUMBER,
    f"{_MIRRORED}test_mirrored_refuses_what_names_no_devices[['cpu:0', 0]-": _BY_NUMBER,
    f"{_MIRRORED}test_mirrored_refuses_what_names_no_devices[['gpu:0']-": "here is a GPU",
    "tests/unit/strategies/test_mirrored.py::test_one_device_takes_a_device[3]": _BY_NUMBER,
}


def files_of(suites: Iterable[str], root: Path = ROOT) -> list[str]:
    """Returns the test files of suites, in order, each once.

    Raises:
        ValueError: an unknown suite, or a path that is not there.
    """
    found: dict[str, None] = {}
    for suite in suites:
        if suite not in SUITES:
            raise ValueError(f"Unknown suite {suite!r}. Expected some of {', '.join(SUITES)}.")
        for name in SUITES[suite]:
            path = root / name
            files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            if not files or not files[0].is_file():
                raise ValueError(f"{name} of the suite {suite!r} has no tests: correct SUITES.")
            found |= dict.fromkeys(file.relative_to(root).as_posix() for file in files)
    return list(found)


def suite_of(test: str) -> str:
    """Returns the suite of a test id, or "other"."""
    file = test.partition("::")[0]
    for suite, names in SUITES.items():
        if any(file == name or file.startswith(f"{name}/") for name in names):
            return suite
    return "other"


def not_for_a_gpu(test: str) -> str | None:
    """Returns the reason to leave a test out, or None."""
    for start, reason in NOT_FOR_A_GPU.items():
        begins = start if start.endswith("-") else (f"{start}[", f"{start}::", f"{start}/")
        if test == start or test.startswith(begins):
            return reason
    return None


# Tests that hold for several replicas only, by id or, for all rows, by name. `gpu_alone` leaves
# them to `gpu`.
_SEVERAL = Path(__file__).with_name("needs_several.txt")


def needs_several() -> frozenset[str]:
    """Returns the ids of tests that need several replicas."""
    return frozenset(_SEVERAL.read_text(encoding="utf-8").splitlines())
