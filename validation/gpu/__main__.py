"""Runs checks of the GPU: `python -m validation.gpu [NAME ...]`.

Without names, all that can share the GPU, in the order of their priority. `--alone` runs the others
one by one. Each result is written at once, to the folder STRATAGEM_GPU_RESULTS.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

from validation.gpu import checks, register
from validation.gpu.checks import CHECKS, Check

assert register


def main() -> int:
    """Returns the number of failed checks."""
    parser = argparse.ArgumentParser(prog="python -m validation.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="checks; all without a name")
    parser.add_argument("--processes", type=int, default=12, help="checks at once")
    parser.add_argument("--alone", action="store_true", help="those that need the whole machine")
    parser.add_argument("--limit", type=float, default=600, help="seconds for all")
    parser.add_argument("--resume", action="store_true", help="only what has not passed before")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CHECKS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    if options.inside:
        return _run_here(CHECKS[options.names[0]])
    wanted = [CHECKS[name] for name in options.names]
    if not wanted:
        wanted = [one for one in CHECKS.values() if one.is_alone == options.alone]
    if options.resume:
        wanted = [one for one in wanted if not checks.has_passed(one.name)]
    wanted.sort(key=lambda one: one.priority)
    if options.list:
        print(*(one.name for one in wanted), sep="\n")
        return 0
    return _run_all(wanted, 1 if options.alone else options.processes, options.limit)


def _run_here(one: Check) -> int:
    begin_s = time.monotonic()
    result: dict[str, Any] = {"name": one.name, "passed": False, "figures": {}}
    try:
        result["figures"] = one.run()
        result["passed"] = True
    except BaseException:  # noqa: BLE001 - the process ends
        result["error"] = traceback.format_exc()
    result["time_s"] = time.monotonic() - begin_s
    checks.save(one.name, result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if result["passed"] else 1)  # what a check left behind must not hold it up


def _run_all(wanted: list[Check], num_processes: int, limit_s: float) -> int:
    end_s = time.monotonic() + limit_s
    failed: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(num_processes) as pool:
        futures = {pool.submit(run_check, one, end_s): one for one in wanted}
        for future in concurrent.futures.as_completed(futures):
            one, (passed, time_s, last) = futures[future], future.result()
            word = "passed" if passed else "FAILED"
            print(f"{word} {one.name} {time_s:.1f} s {last}", flush=True)
            if not passed:
                failed.append(one.name)
    print(
        f"{len(wanted) - len(failed)} of {len(wanted)} passed; failed: {', '.join(failed) or '-'}"
    )
    return len(failed)


def run_check(one: Check, end_s: float | None = None) -> tuple[bool, float, str]:
    """Runs a check in its process; returns whether it passed, its time and the last line."""
    begin_s = time.monotonic()
    left_s = one.timeout_s if end_s is None else min(one.timeout_s, end_s - begin_s)
    if left_s < 5:
        checks.save(one.name, {"name": one.name, "passed": False, "error": "no time was left"})
        return False, 0.0, "no time was left"
    log = checks.results_folder() / f"{one.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "validation.gpu", "--inside", one.name],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=checks.environment_of(one),
            cwd=checks.ROOT,
            start_new_session=True,
        )
        try:
            code = process.wait(left_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
            time.sleep(1)
            code = None
        _end_group(process)
    time_s = time.monotonic() - begin_s
    if code == 0:
        skipped = checks.loaded(one.name)["figures"].get("skipped")
        return True, time_s, f"skipped: {skipped}" if skipped else ""
    lines = log.read_text(errors="replace").splitlines()
    reason = f"not done after {left_s:.0f} s" if code is None else f"exit code {code}"
    result = checks.results_folder() / f"{one.name}.json"
    if code != 1 or not result.is_file():
        checks.save(
            one.name, {"name": one.name, "passed": False, "error": reason, "log": lines[-80:]}
        )
        return False, time_s, reason
    error = checks.loaded(one.name).get("error", "").strip().splitlines()
    return False, time_s, error[-1][:300] if error else reason


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what a check has started and not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
