"""`stratagem goodput`: breakdown of a run's wall time."""

from __future__ import annotations

from pathlib import Path

import click

from stratagem.cli.commands import json_option, print_json


@click.command("goodput")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also plot it: FILE.png."
)
@json_option
def command(run_dir: Path, plot: Path | None, *, as_json: bool) -> None:
    """Show a run's useful time, and where the rest went.

    RUN_DIR is the folder with the run's events.
    """
    from stratagem.observe import report_page, terminal
    from stratagem.observe.goodput import account_for, read_run

    try:
        run = read_run(run_dir)
        if plot is not None:
            report_page.draw(run, plot)
    except (ImportError, LookupError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    account = account_for(run)
    if as_json:
        print_json(account.as_dict())
        return
    terminal.show_account(account)
