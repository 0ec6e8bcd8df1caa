"""`python -m validation.chaos`: a campaign of faults, and the replay of one trial."""

from __future__ import annotations

import json
import os

import click
import rich.console

from validation.chaos import report
from validation.chaos.campaign import ROOT, Campaign, run_trial
from validation.chaos.jobs import GOOD
from validation.chaos.sandbox import why_impossible

_WIDTH_OF_A_FILE = 160


@click.command(help=__doc__)
@click.option("--number", default=1000, help="Number of faults.")
@click.option("--seed", default=7, help="Seed of the campaign.")
@click.option("--job", help="Only this job.")
@click.option("--fault", help="Only this kind of fault.")
@click.option("--parallel", default=max(2, os.cpu_count() or 1), help="Trials at once.")
@click.option("--replay", type=int, help="Repeats the trial of this seed, and shows all of it.")
def main(
    number: int, seed: int, job: str | None, fault: str | None, parallel: int, replay: int | None
) -> None:
    """Runs a campaign, or replays a trial."""
    if why := why_impossible():
        raise click.ClickException(f"The campaign {why}.")
    console = rich.console.Console()
    if not console.is_terminal:  # a log is as wide as the table
        console = rich.console.Console(width=_WIDTH_OF_A_FILE)
    folder = ROOT / "runs" / "chaos" / "-".join(filter(None, (str(seed), job, fault)))
    folder.mkdir(parents=True, exist_ok=True)
    if replay is not None:
        result = run_trial(replay, folder, job, fault)
        for name in ("output", "stacks"):
            click.echo(result.pop(name, ""))
        click.echo(json.dumps(result, indent=1))
        raise SystemExit(result["outcome"] not in GOOD)
    campaign = Campaign(seed, folder, job, fault)
    campaign.run(number, parallel)
    results = campaign.results()
    console.print(report.table(results))
    report.plot(results, folder / "times.png")
    console.print(f"Results and plot: {folder}")
    raise SystemExit(any(result["outcome"] not in GOOD for result in results))


if __name__ == "__main__":
    main()
