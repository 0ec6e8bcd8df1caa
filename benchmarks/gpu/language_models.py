"""Command: all of language models on one GPU: `python -m benchmarks.gpu.language_models`.

Sides, checks, plans for more cards and the report are processes, one after the other. A call with
the folder of an earlier one does only what is missing there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_profile.parts import Part, run_parts

__all__ = ["CHECKS", "main"]

CHECKS = (
    "tuned_llama_generates_and_is_exported",
    "killed_while_a_kernel_runs",
    "killed_worker_resumes_on_the_gpu",
    "kernel_that_does_not_end",
    "out_of_memory",
)
_KEPT_S = {"sides": 0.0, "checks": 120.0, "cards": 0.0}  # of the budget, from the parts before
_REPORT_S, _END_S = 30.0, 15.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts within the budget, and prints the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.language_models", description=__doc__
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of all results")
    parser.add_argument("--budget-s", type=float, default=1800.0, help="seconds of all parts")
    parser.add_argument("--parts", default=",".join(_KEPT_S), help="of sides, checks and cards")
    parser.add_argument("--only", default="llama", help="sides, as for benchmarks.gpu")
    parser.add_argument("--checks", default=",".join(CHECKS), help="names, as for tests.gpu")
    parser.add_argument("--chip", default="H200", help="of the plans for 8 and 64 cards")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU")
    parsed = parser.parse_args(arguments)
    chosen = parsed.parts.split(",")
    if unknown := [name for name in chosen if name not in _KEPT_S]:
        parser.error(f"--parts: {', '.join(unknown)}; there are {', '.join(_KEPT_S)}")
    output: Path = parsed.output
    output.mkdir(parents=True, exist_ok=True)
    # The checks read these, here and in their processes.
    os.environ["STRATAGEM_GPU_RESULTS"] = str((output / "checks").resolve())
    if parsed.tiny:
        os.environ["STRATAGEM_GPU_CHECKS_ON"] = "cpu"
    end_s = time.monotonic() + parsed.budget_s - _REPORT_S
    waiting = [name for name in _KEPT_S if name in chosen and not _is_done(name, parsed)]
    while waiting:
        name = waiting.pop(0)
        limit_s = end_s - time.monotonic() - sum(_KEPT_S[other] for other in waiting)
        if limit_s > 0:
            run_parts([Part(name, _command(name, parsed, limit_s), limit_s + _END_S)], output)
        else:
            print(f"{name}: no time is left", flush=True)
        if name == "sides":
            _report(output)
    _print_summaries(output)


def _is_done(name: str, parsed: argparse.Namespace) -> bool:
    """Returns True if no time needs to be kept for a part."""
    if name == "checks":
        paths = [parsed.output / name / f"{check}.json" for check in parsed.checks.split(",")]
        return all(path.is_file() and json.loads(path.read_text())["passed"] for path in paths)
    return name == "cards" and (parsed.output / "cards" / "summary.md").is_file()


def _command(name: str, parsed: argparse.Namespace, limit_s: float) -> list[str]:
    """Returns the arguments of the interpreter for a part."""
    tiny = ["--tiny"] if parsed.tiny else []
    if name == "sides":
        sizes = ["--device-gb", "130", "--round-s", "5", "--gated", "--budget-s", f"{limit_s:.0f}"]
        folder = ["--output", str(parsed.output / "sides")]
        return ["-m", "benchmarks.gpu", "--only", parsed.only, "--resume", *sizes, *folder, *tiny]
    if name == "checks":
        limit = ["--processes", "2", "--limit", f"{limit_s:.0f}"]
        return ["-m", "tests.gpu", "--resume", *limit, *parsed.checks.split(",")]
    folder = ["--output", str(parsed.output / "cards")]
    return ["-m", "benchmarks.gpu.cards", "--chip", parsed.chip, *folder, *tiny]


def _report(output: Path) -> None:
    """Writes the tables and the plot of the sides."""
    results = output / "sides" / "results.json"
    if results.is_file():
        arguments = ["-m", "benchmarks.gpu.report", str(results), "--output"]
        run_parts([Part("report", [*arguments, str(output / "report")], _REPORT_S)], output)


def _print_summaries(output: Path) -> None:
    for path in ("report/tables.txt", "checks.log", "cards/summary.md"):
        if (output / path).is_file():
            print((output / path).read_text(encoding="utf-8"), flush=True)


if __name__ == "__main__":
    main()
