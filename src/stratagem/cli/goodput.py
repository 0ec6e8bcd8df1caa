"""`stratagem goodput`: breakdown of a run's wall time."""

from __future__ import annotations

import json
from pathlib import Path

import click

__all__ = ["command"]


@click.command("goodput")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also plot it: FILE.png."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(run_dir: Path, plot: Path | None, *, as_json: bool) -> None:
    """Show a run's useful time, and where the rest went.

    RUN_DIR is the folder with the run's events.
    """
    from stratagem import goodput
    from stratagem.goodput import plot as plotting
    from stratagem.goodput import report

    try:
        account = goodput.account_for(goodput.read_run(run_dir))
        if plot is not None:
            plotting.draw(account, plot)
    except (ImportError, LookupError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(account.as_dict(), indent=2))
        return
    report.show(account)
