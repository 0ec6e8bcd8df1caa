"""Profiles models on one GPU: `python -m benchmarks.gpu_profile --output DIR [--tiny]`."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.gpu_profile.parts import Part, run_parts

_NAMES = ("resnet50_256", "gpt_350m", "bert_base", "resnet50_64", "mlp")


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder.")
@click.option("--tiny", is_flag=True, help="Sizes for a test.")
@click.option("--only", default="", help="Names of models, separated by commas.")
@click.option("--limit-s", default=120.0, help="Seconds of a model's process.")
@click.option("--worker", default="", hidden=True)
@click.option("--unfused", is_flag=True, hidden=True)
def main(
    output: Path, *, tiny: bool, only: str, limit_s: float, worker: str, unfused: bool
) -> None:
    """Profiles each model in a process of its own, one after the other."""
    output.mkdir(parents=True, exist_ok=True)
    if worker:
        from benchmarks.gpu_profile.worker import profile_case

        profile_case(worker, output, is_tiny=tiny, is_fused=not unfused)
        return
    names = only.split(",") if only else list(_NAMES)
    common = [
        "-m",
        "benchmarks.gpu_profile",
        "--output",
        str(output),
        *(["--tiny"] if tiny else []),
    ]
    parts = [Part(name, [*common, "--worker", name], limit_s) for name in names]
    run_parts(parts, output)


if __name__ == "__main__":
    main()
