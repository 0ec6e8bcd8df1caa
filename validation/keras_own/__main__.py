"""Runs Keras's own tests plain and in each strategy's scope: `make test-external NAME=keras`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from validation.keras_own.differences import Comparison, compare, read, recorded, write

_HERE = Path(__file__).parent
_LIST = _HERE / "differences.toml"
_RUNS = _HERE.parents[1] / "runs" / "test-keras"
_STRATEGIES = ["one_device", "mirrored", "central", "hybrid", "tpu"]
_FOLDERS = [
    "callbacks",
    "layers/normalization",
    "layers/rnn",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "saving",
    "trainers",
]
# As the other tests: a thread pool that virtual devices cannot exhaust, and quick compilation.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    # What one process has compiled serves the others: most are single operations.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "NPROC": "32",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}


def main() -> int:
    """Compares the outcomes with the list; 1 where it is not true."""
    parser = argparse.ArgumentParser(prog="python -m validation.keras_own", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the list anew")
    parser.add_argument("--workers", default="2", help="processes of pytest")
    parser.add_argument("--paths", nargs="+", default=_FOLDERS, help="in keras/src")
    parser.add_argument("--strategies", nargs="+", default=_STRATEGIES, choices=_STRATEGIES)
    arguments = parser.parse_args()
    _RUNS.mkdir(parents=True, exist_ok=True)
    reasons = read(_LIST.read_text(encoding="utf-8"))
    listed = {
        key: reason for key, reason in reasons.items() if key[1].startswith(tuple(arguments.paths))
    }
    plain = _outcomes(None, arguments.paths, arguments.workers)
    comparisons = {
        name: compare(name, plain, _outcomes(name, arguments.paths, arguments.workers), listed)
        for name in arguments.strategies
    }
    for name, comparison in comparisons.items():
        _show(name, comparison)
    if arguments.record:
        others = {key: reason for key, reason in reasons.items() if key not in listed}
        _LIST.write_text(write({**others, **recorded(listed, comparisons)}), encoding="utf-8")
    for name, comparison in comparisons.items():
        print(comparison.summary(name))
    return 0 if all(comparison.is_as_listed for comparison in comparisons.values()) else 1


def _outcomes(strategy: str | None, paths: list[str], workers: str) -> dict[str, str]:
    """The outcome of each test in a strategy's scope, or in none."""
    name = strategy or "plain"
    spec = importlib.util.find_spec("keras")
    assert spec is not None
    assert spec.origin is not None
    tests = Path(spec.origin).parent / "src"
    outcomes = _RUNS / f"{name}.json"
    outcomes.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "validation.keras_own.plugin"]
    command += ["-c", str(_HERE / "keras.ini"), "--rootdir", str(tests), "-p", "no:cacheprovider"]
    # Not our own conftest.py, where the environment lies in a checkout: it makes eight devices.
    command += ["--confcutdir", str(tests)]
    command += ["--numprocesses", workers, "--dist", "worksteal", "--continue-on-collection-errors"]
    command += ["--quiet", "--tb", "short", "-rs"]
    command += ["--outcomes", str(outcomes), *([f"--strategy={strategy}"] if strategy else [])]
    command += [str(tests / path) for path in paths]
    log, start_s = _RUNS / f"{name}.log", time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            "JAX_COMPILATION_CACHE_DIR": str(_RUNS / "programs"),
        }
        code = subprocess.run(command, env=environment, stdout=output, stderr=output).returncode
    print(f"{name}: {time.monotonic() - start_s:.0f} s, pytest's report in {log}", flush=True)
    if code not in (0, 1) or not outcomes.exists():
        raise SystemExit(f"pytest ended with {code}; see {log}")
    return json.loads(outcomes.read_text(encoding="utf-8"))


def _show(name: str, comparison: Comparison) -> None:
    for test in comparison.new:
        print(f"{name}: differs from plain Keras without a reason in the list: {test}")
    for test in comparison.mended:
        print(f"{name}: is listed and does not differ: {test}")


if __name__ == "__main__":
    raise SystemExit(main())
