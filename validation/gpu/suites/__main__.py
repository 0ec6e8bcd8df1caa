"""`python -m validation.gpu.suites --limit-s 150`: test suites on the GPU, into runs/on_gpu."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click

from tests.platforms import PLATFORMS, VARIABLE
from validation.gpu.suites.files import ROOT, SUITES, files_of
from validation.gpu.suites.recording import RECORD, UNTIL
from validation.gpu.suites.summary import to_text, write_summary

# Collecting, a test that runs at the limit, and the reports.
_GRACE_S = 15.0
# Small programs need no search for their fastest kernels.
_FLAGS = "--xla_gpu_autotune_level=0"


def run_environment(
    platform: str, record: Path, until_s: float, given: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the environment of a run."""
    environment = {
        **given,
        VARIABLE: platform,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT / "src"), str(ROOT), given.get("PYTHONPATH")])
        ),
        "KERAS_BACKEND": "jax",
        UNTIL: str(until_s),
        RECORD: str(record),
    }
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "build" / "gpu-test-programs"))
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    if platform.startswith("gpu"):
        environment["XLA_FLAGS"] = f"{given.get('XLA_FLAGS', '')} {_FLAGS}".strip()
    return environment


def pytest_arguments(tests: list[str], processes: int, timeout_s: float, folder: Path) -> list[str]:
    """Returns the arguments of pytest; tests are files, or one "@file" of test ids."""
    arguments = [
        "-q",
        "-p",
        "validation.gpu.suites.recording",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    # pytest-benchmark warns beside pytest-xdist, and warnings are errors here.
    arguments += [
        "-p",
        "no:benchmark",
        "--continue-on-collection-errors",
        f"--junitxml={folder / 'junit.xml'}",
    ]
    # Above pytest-timeout's limit: this one ends the process, which pytest-xdist replaces.
    arguments += ["-o", f"faulthandler_timeout={timeout_s * 1.5:.0f}"]
    if importlib.util.find_spec("pytest_timeout"):
        arguments += [f"--timeout={timeout_s:.0f}", "--timeout-method=signal"]
    if processes > 1:
        # A file's tests share what is dear to make. Single tests of many files are dealt out.
        spread = ["load"] if tests[0].startswith("@") else ["loadfile", "--no-loadscope-reorder"]
        arguments += ["--numprocesses", str(processes), "--dist", *spread]
    return [*arguments, *tests]


def wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Waits for a run; interrupts it after the limit, and kills it if that does not end it."""
    for seconds, signum in ((limit_s, signal.SIGINT), (10.0, signal.SIGKILL), (10.0, None)):
        try:
            return f"exit status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            if signum is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)
    return "did not end"


@click.command()
@click.option("--list", "lists", is_flag=True, help="Print the suites and their files, and end.")
@click.option("--suites", default=",".join(SUITES), help="Suites, by comma, in order.")
@click.option("--only", type=click.Path(path_type=Path), help="A file of test ids: failed.txt.")
@click.option("--processes", default=12, show_default=True)
@click.option("--limit-s", default=150.0, show_default=True, help="For all; then it reports.")
@click.option("--timeout-s", default=60.0, show_default=True, help="For one test.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/on_gpu"))
@click.option("--platform", type=click.Choice(PLATFORMS), default="gpu")
@click.argument("pytest_options", nargs=-1, type=click.UNPROCESSED)
def main(
    lists: bool,
    suites: str,
    only: Path | None,
    processes: int,
    limit_s: float,
    timeout_s: float,
    output: Path,
    platform: str,
    pytest_options: tuple[str, ...],
) -> None:
    """Runs test suites with the GPU as the default device, within a time limit.

    PYTEST_OPTIONS go on to pytest: write them after "--".
    """
    started_s = time.time()
    if only and not only.read_text(encoding="utf-8").strip():
        print(f"{only} names no tests.")  # pytest would run all
        return
    tests = [f"@{only.resolve()}"] if only else files_of(suites.split(","))
    if lists:
        print("\n".join(f"{suite}: {len(files_of([suite]))} files" for suite in SUITES))
        print("\n".join(tests))
        return
    folder = output.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    until_s = started_s + limit_s - _GRACE_S
    environment = run_environment(platform, folder / "record.jsonl", until_s)
    command = [
        sys.executable,
        "-m",
        "pytest",
        *pytest_arguments(tests, processes, timeout_s, folder),
    ]
    with (folder / "pytest.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *pytest_options],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = wait(process, limit_s - (time.time() - started_s))
    summary = write_summary(folder)
    print(to_text(summary))
    print(f"pytest: {ended}, {time.time() - started_s:.0f} s; details in {output}")
    raise SystemExit(int("failed" in summary["total"] or not summary["total"]))


if __name__ == "__main__":
    main()
