"""Runs one of the checks beside `make test`: `make test-external NAME=... ARGS=...`.

    python -m validation NAME [ARGS...]     from the root of the repository; without NAME, the list

Needs the standard library alone: the environment of a check is made first.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_MAIN, _EXTERNAL, _PEERS = ".venv", ".venv-external", ".venv-peers"
_PYTEST = "pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder"
# As `make test` compiles: for no speed, and each program once for all processes.
_QUICKLY = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "JAX_COMPILATION_CACHE_DIR": str(_ROOT / "build" / "test-programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


@dataclass(frozen=True)
class Check:
    """Commands for `python -m`, one after the other. The first one gets the arguments.

    Args:
        shows: what it is good for.
        environment: the folder whose interpreter runs it; None for the one of this program.
        commands: modules with their arguments.
        variables: of the environment, where the shell has no others.
    """

    shows: str
    environment: str | None
    commands: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


CHECKS = {
    "chaos": Check(
        "1000 faults at random times and places; --number, --seed. Needs root, tc and iptables",
        _MAIN,
        ("validation.chaos", "pytest validation/chaos"),
    ),
    "crds": Check(
        "manifests against the definitions of JobSet, TrainJob and KubeRay; --renew. Needs GitHub",
        _MAIN,
        ("validation.crds", "pytest validation/crds"),
    ),
    "fuzz": Check(
        "1000000 frames for each parser of a socket; --frames, --only",
        _EXTERNAL,
        ("validation.fuzz", f"{_PYTEST} -k fuzzed tests/unit", "pytest validation/fuzz"),
        variables={"FUZZ_EXAMPLES": "1000"},
    ),
    "gpu-compiler": Check(
        "the training step compiled for eight H100. Needs no GPU",
        _EXTERNAL,
        ("pytest tests/unit/planning/programs/test_gpu.py tests/unit/planning/test_gpu.py",),
    ),
    "keras": Check(
        "Keras's own tests with each strategy as the current one; --record renews the list",
        _MAIN,
        ("validation.keras_own", "pytest validation/keras_own"),
    ),
    "latest": Check(
        "the nightly Keras and JAX: what they moved, and the compatibility tests; --released",
        None,
        ("validation.latest",),
    ),
    "mutants": Check(
        "coverage by package, and 40 small mistakes in each: how many the quick tests notice",
        _EXTERNAL,
        ("validation.mutants",),
        variables=_QUICKLY,
    ),
    "peers": Check(
        "datasets of TensorFlow, PyTorch and Hugging Face, and TensorFlow's data service",
        _PEERS,
        (
            "pytest tests/unit/input/sources tests/unit/input/service/test_tf_data_service.py"
            " tests/unit/keras/training/test_data_sources.py",
        ),
    ),
    "r": Check(
        "the page about R, by R; installs R and reticulate from Debian's packages",
        _MAIN,
        ("validation.r",),
        variables=_QUICKLY,
    ),
    "ray": Check(
        "strategies inside Ray Train, Ray Tune and Ray jobs, on a cluster of one machine",
        _EXTERNAL,
        ("pytest validation/ray",),
        variables=_QUICKLY,
    ),
    "slurm": Check(
        "scripts of `stratagem slurm render` on a Slurm of three nodes. Needs root on Debian",
        _MAIN,
        ("validation.slurm",),
        variables=_QUICKLY,
    ),
    "soak": Check(
        "4 hours of training, a process killed every two minutes: nothing may grow; --hours",
        _MAIN,
        ("validation.soak", "pytest validation/soak"),
    ),
    "third-party": Check(
        "KerasHub, KerasRS, KerasTuner, Optax, Flax, Haiku and Equinox under strategies",
        _EXTERNAL,
        (f"{_PYTEST} validation/third_party",),
        variables=_QUICKLY,
    ),
    "tpu": Check(
        "training steps compiled for TPUs of 8 to 256 chips. Needs no TPU",
        _EXTERNAL,
        (
            "pytest tests/unit/planning/programs tests/unit/planning/test_tpu.py"
            " --ignore tests/unit/planning/programs/test_gpu.py",
        ),
    ),
}


def main() -> int:
    """Runs the check that the command line names."""
    name, *arguments = sys.argv[1:] or ["--list"]
    if name == "--list":
        width = max(map(len, CHECKS))
        for known, check in CHECKS.items():
            print(f"{known:{width}}  {check.shows} ({check.environment or 'made anew each time'})")
        return 0
    if name not in CHECKS:
        print(f"No check {name!r}: there is {', '.join(CHECKS)}.", file=sys.stderr)
        return 2
    check = CHECKS[name]
    python = sys.executable
    if check.environment is not None:
        subprocess.run(["make", f"{check.environment}/.complete"], cwd=_ROOT, check=True)
        python = str(_ROOT / check.environment / "bin" / "python")
    variables = {**check.variables, **os.environ}
    for command in check.commands:
        words = [python, "-m", *shlex.split(command), *arguments]
        print(shlex.join(words[1:]), flush=True)
        if code := subprocess.run(words, cwd=_ROOT, env=variables, check=False).returncode:
            return code
        arguments = []
    return 0


if __name__ == "__main__":
    sys.exit(main())
