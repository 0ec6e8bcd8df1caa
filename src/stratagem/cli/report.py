"""`stratagem report`: a run, or two side by side, as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; RUN_DIR/report.html by default.",
)
def command(run_dir: Path, other: Path | None, output: Path | None) -> None:
    """Write a report of one run, or two, as an HTML file.

    The file needs no network. RUN_DIR and OTHER are folders with events of runs.
    """
    from stratagem.observe.monitoring.html_report import write_report

    output = output or run_dir / "report.html"
    try:
        write_report([run_dir] if other is None else [run_dir, other], output)
    except (ImportError, LookupError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"Wrote {output}.")
