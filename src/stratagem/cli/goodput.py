"""`stratagem goodput`: where the time of a run went.

What reads and draws is loaded when the command is called.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import click

__all__ = ["command"]


@click.command("goodput")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw it, too: FILE.png."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(run_dir: Path, plot: Path | None, *, as_json: bool) -> None:
    """Show where the time of a run went.

    RUN_DIR is the folder into which the run has written its events.
    """
    goodput = importlib.import_module("stratagem.goodput")
    try:
        account = goodput.account_for(goodput.read_run(run_dir))
        if plot is not None:
            importlib.import_module("stratagem.goodput.plot").draw(account, plot)
    except (ImportError, LookupError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(account.as_dict(), indent=2))
        return
    console = importlib.import_module("rich.console").Console()
    importlib.import_module("stratagem.goodput.report").show(account, console)
