"""Plans beside measurements on one GPU: `python -m benchmarks.gpu_plan --output DIR [--tiny]`.

First all models are planned and warmed at the same time, which is mostly compilation. Then they are
measured one after the other. The programs of eight GPUs are compiled last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_profile.parts import Part, run_parts

_NAMES = ("mlp", "resnet50_64", "resnet50_256", "bert_base", "gpt_350m")
_EIGHT = ("mlp", "resnet50_64", "gpt_350m")
_STATES = ("none", "optimizer", "all")
_PARTS = ("plan", "measure", "eight")


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder.")
@click.option("--tiny", is_flag=True, help="Sizes for a test.")
@click.option("--only", default="", help="Names of models, separated by commas.")
@click.option("--parts", default="plan,measure", help="Of plan, measure and eight.")
@click.option("--limit-s", default=120.0, help="Seconds of a process.")
@click.option("--at-once", default=5, help="Processes that compile at the same time.")
@click.option("--worker", default="", hidden=True)
def main(
    output: Path, *, tiny: bool, only: str, parts: str, limit_s: float, at_once: int, worker: str
) -> None:
    """Runs the parts that are asked for, and writes a summary."""
    output.mkdir(parents=True, exist_ok=True)
    if worker:
        _work(worker, output, is_tiny=tiny)
        return
    names: list[str] = only.split(",") if only else [*_NAMES]
    common = ["-m", "benchmarks.gpu_plan", "--output", str(output), *(["--tiny"] if tiny else [])]

    def part(*worker: str) -> Part:
        return Part("-".join(worker), [*common, "--worker", ":".join(worker)], limit_s)

    wanted = parts.split(",")
    for name in names if "measure" in wanted else ():
        # A file of an earlier run would pass for this one's.
        (output / f"{name}.measured.json").unlink(missing_ok=True)
    preparations = [part("chip", "attached")] if "plan" in wanted else []
    preparations += [part("plan", name) for name in names if "plan" in wanted]
    preparations += [part("warm", name) for name in names if "measure" in wanted]
    run_parts(preparations, output, at_once=at_once)
    if "measure" in wanted:
        run_parts([part("measure", name) for name in names], output)
        _write_summary(names, output)
    if "eight" in wanted:
        programs = [part("eight", name, state) for name in _EIGHT for state in _STATES]
        run_parts(programs, output, at_once=at_once)


def _work(worker: str, output: Path, *, is_tiny: bool) -> None:
    from benchmarks.gpu_plan.eight import write_eight
    from benchmarks.gpu_plan.worker import describe_chip, measure_case, plan_case

    kind, name, *state = worker.split(":")
    if kind == "eight":
        write_eight(name, None if state == ["none"] else state[0], output, is_tiny=is_tiny)
    elif kind == "chip":
        describe_chip(output)
    elif kind == "plan":
        plan_case(name, output, is_tiny=is_tiny, is_fused=True)
    else:
        measure_case(name, output, is_tiny=is_tiny, is_fused=True)


def _write_summary(names: list[str], output: Path) -> None:
    rows: list[dict[str, Any]] = []
    for name in names:
        planned, measured = (_read(output / f"{name}.{kind}.json") for kind in _FILES)
        step_s = measured.get("scanned_step_s") or measured.get("step_s")
        rows.append(
            {
                "model": name,
                "compiler": planned.get("plan", {}).get("compiler"),
                "planned_bytes": planned.get("total_bytes"),
                "measured_bytes": measured.get("peak_bytes"),
                "memory_ratio": _ratio(planned.get("total_bytes"), measured.get("peak_bytes")),
                "planned_s": planned.get("step_s"),
                "measured_s": step_s,
                "time_ratio": _ratio(planned.get("step_s"), step_s),
            }
        )
        print(rows[-1], flush=True)
    (output / "summary.json").write_text(json.dumps(rows, indent=1))


_FILES = ("planned", "measured")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _ratio(planned: float | None, measured: float | None) -> float | None:
    return planned / measured if planned and measured else None


if __name__ == "__main__":
    main()
