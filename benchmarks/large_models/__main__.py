"""Compiles training steps of large decoders: `python -m benchmarks.large_models --output DIR`.

Each program is compiled in a process of its own, for devices that are not here: this needs libtpu,
or JAX's plugin for CUDA (`.venv-external`). A folder with results is continued, so that an
interrupted run loses one program.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_profile.parts import Part, run_parts
from benchmarks.large_models.cases import CASES, Case, make_case
from benchmarks.large_models.report import draw, make_table, read_results

_SUMMARY = "summary.md"


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder.")
@click.option("--only", default="", help="Cases whose name contains all of these words.")
@click.option("--case", "text", default="", help="One case, as JSON; no other is compiled.")
@click.option("--full", is_flag=True, help="The compiler takes the time that it needs.")
@click.option("--before", type=click.Path(path_type=Path), help="Folder of an earlier revision.")
@click.option("--limit-s", default=1800.0, help="Seconds of a process.")
@click.option("--at-once", default=1, help="Processes at the same time.")
@click.option("--worker", is_flag=True, hidden=True)
def main(
    output: Path,
    *,
    only: str,
    text: str,
    full: bool,
    before: Path | None,
    limit_s: float,
    at_once: int,
    worker: bool,
) -> None:
    """Compiles the cases that have no result yet, and writes a table and a picture of all."""
    output.mkdir(parents=True, exist_ok=True)
    cases = [make_case(json.loads(text))] if text else [*CASES]
    cases = [case for case in cases if all(word in case.name for word in only.split())]
    if worker:
        _compile(cases[0], output, is_quick=not full)
        return
    common = ["-m", "benchmarks.large_models", "--worker", "--output", str(output)]
    common += ["--full"] if full else []
    missing = [case for case in cases if not _path(output, case).exists()]
    print(f"{len(missing)} of {len(cases)} programs to compile", flush=True)
    parts = [Part(one.name, [*common, "--case", one.as_json()], limit_s) for one in missing]
    run_parts(parts, output, at_once=at_once)
    results = read_results(output)
    earlier = read_results(before) if before else []
    table = make_table(results, earlier)
    (output / _SUMMARY).write_text(table)
    print(table)
    draw(output / "large_models.png", results, earlier)


def _path(output: Path, case: Case) -> Path:
    return output / f"{case.name}.json"


def _compile(case: Case, output: Path, *, is_quick: bool) -> None:
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # times are of a compiler that works
    from benchmarks.large_models.programs import chips_of, describe_case

    facts: dict[str, Any] = describe_case(case, chips_of(case.machine), is_quick=is_quick)
    _path(output, case).write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
