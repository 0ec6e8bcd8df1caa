"""`stratagem report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; RUN_DIR/report.html by default.",
)
def command(run_dir: Path, output: Path | None) -> None:
    """Write a report of a run as an HTML file.

    The file needs no network. RUN_DIR is the folder with the run's events.
    """
    from stratagem.observe.report_page import write_report

    output = output or run_dir / "report.html"
    try:
        write_report(run_dir, output)
    except (ImportError, LookupError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"Wrote {output}.")
