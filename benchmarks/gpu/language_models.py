"""Command: all of language models on one GPU: `python -m benchmarks.gpu.language_models`.

Sides, checks, programs for more cards and the report are processes, one after the other. A call
with the folder of an earlier one does only what is missing there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_profile.parts import Part, run_parts
from benchmarks.large_models.cases import Case

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
    parser.add_argument("--checks", default=",".join(CHECKS), help="names, as for validation.gpu")
    parser.add_argument("--chip", default="H200", help="of the programs for 8 and 64 cards")
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
    waiting = [name for name in _KEPT_S if name in chosen and not _has_passed(name, parsed)]
    while waiting:
        name = waiting.pop(0)
        limit_s = end_s - time.monotonic() - sum(_KEPT_S[other] for other in waiting)
        if limit_s > 0:
            commands = _commands(name, parsed, limit_s)
            parts = [Part(key, command, limit_s + _END_S) for key, command in commands.items()]
            run_parts(parts, output, at_once=len(parts))
        else:
            print(f"{name}: no time is left", flush=True)
        if name == "sides":
            _report(output)
    _print_summaries(output)


def _has_passed(name: str, parsed: argparse.Namespace) -> bool:
    """Returns True for the checks if all have passed before."""
    paths = [parsed.output / "checks" / f"{check}.json" for check in parsed.checks.split(",")]
    return name == "checks" and all(
        path.is_file() and json.loads(path.read_text(encoding="utf-8"))["passed"] for path in paths
    )


def _commands(name: str, parsed: argparse.Namespace, limit_s: float) -> dict[str, list[str]]:
    """Returns the arguments of the interpreter for each process of a part."""
    tiny = ["--tiny"] if parsed.tiny else []
    folder = ["--output", str(parsed.output / name)]
    if name == "sides":
        sizes = ["--device-gb", "130", "--round-s", "5", "--gated", "--budget-s", f"{limit_s:.0f}"]
        sides = ["-m", "benchmarks.gpu", "--only", parsed.only, "--resume"]
        return {name: [*sides, *sizes, *folder, *tiny]}
    if name == "checks":
        limit = ["--processes", "2", "--limit", f"{limit_s:.0f}"]
        return {name: ["-m", "validation.gpu", "--resume", *limit, *parsed.checks.split(",")]}
    decoder, length = ("tiny", 16) if parsed.tiny else ("1B", 2048)
    cases = [
        Case(decoder, f"{count}x{parsed.chip}", "shard_state=all", "mixed_bfloat16", length=length)
        for count in (8, 64)
    ]
    compiler = ["-m", "benchmarks.large_models", "--full", *folder]
    return {f"cards-{case.machine}": [*compiler, "--case", case.as_json()] for case in cases}


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
