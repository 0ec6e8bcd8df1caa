"""`python -m validation.soak --hours 4`, or of one kind, `lockstep`; plots are in runs/soak."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from validation.soak.growth import Growth, growths
from validation.soak.lockstep import soak_lockstep
from validation.soak.plot import draw
from validation.soak.sampling import read_samples
from validation.soak.servers import soak_servers

_SOAKS = {"lockstep": soak_lockstep, "servers": soak_servers}
_UNITS = {"memory_bytes": (2**20, "MiB of memory")}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(_SOAKS)))
@click.option("--hours", type=float, default=4.0, show_default=True)
@click.option("--kill-every-s", type=float, default=120.0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/soak"))
def main(names: tuple[str, ...], hours: float, kill_every_s: float, output: Path) -> None:
    """Trains for hours, kills a process now and then, and measures what grows."""
    grown = {name: _soak(name, hours, kill_every_s, output) for name in names or sorted(_SOAKS)}
    if any(grown.values()):
        raise SystemExit(f"Series that grew: {grown}.")


def _soak(name: str, hours: float, kill_every_s: float, output: Path) -> int:
    """Returns how many series grew."""
    folder = output.resolve() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console = Console()
    columns = (TextColumn(name), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=hours * 3600)

        def report(text: str) -> None:
            done_s = progress.tasks[0].elapsed or 0.0
            progress.update(task, description=text, completed=done_s)

        result = _SOAKS[name](folder, hours * 3600, kill_every_s, report)
    samples = read_samples(folder / "samples.jsonl")
    found = growths(samples)
    (folder / "result.json").write_text(json.dumps(result, indent=1, default=str))
    draw(samples, folder / "soak.png")
    console.print(_table(found))
    console.print_json(data=result, default=str)
    return sum(not one.is_flat for one in found)


def _table(found: list[Growth]) -> Table:
    table = Table("role", "resource", "level", "rise", "")
    for one in found:
        unit, text = _UNITS.get(one.resource, (1, one.resource.removeprefix("num_")))
        level, rise = one.level / unit, one.rise / unit
        verdict = "flat" if one.is_flat else "[red]grows"
        table.add_row(one.role, text, f"{level:,.1f}", f"{rise:+,.1f}", verdict)
    return table


if __name__ == "__main__":
    main()
