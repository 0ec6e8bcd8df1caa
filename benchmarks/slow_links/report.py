"""What training over slow links costs, as tables and as plots."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.slow_links.curves import TOLERANCE, Point, Training, target_loss

__all__ = ["DRAWN_LINK", "claims", "draw_curves", "make_table", "show_claims"]

DRAWN_LINK = "100 Mbit/s"
_COLORS = {
    "lockstep": "#222222",
    "bfloat16": "#9dc3e6",
    "float16": "#5b9bd5",
    "int8": "#2a78b8",
    "float8": "#1f4e79",
    "PowerSGD": "#8a5bb8",
    "LocalSGD, H=8": "#3a9a5b",
    "DiLoCo, H=50": "#d9702b",
    "DiLoCo, H=50, momentum 0.5": "#e8a87c",
    "LocalSGD, H=50": "#8fcf9f",
    "Streaming DiLoCo, H=50": "#b8860b",
}
# The bounds of the issue that asked for this.
_BYTES_RATIO, _SPEEDUP = 40.0, 10.0
_CLAIMED = ("DiLoCo, H=50", "DiLoCo, H=50, momentum 0.5")


def make_table(trainings: Sequence[Training]) -> Table:
    """Returns a row for each method.

    Args:
        trainings: of one model; the first is in lockstep.
    """
    target = target_loss(trainings)
    links = list(trainings[0].step_s)
    table = Table(
        title=f"{trainings[0].task}: to a validation loss of {target:.3f}, {TOLERANCE:.0%} above "
        f"that of lockstep after {trainings[0].points[-1].steps} steps",
        title_justify="left",
    )
    table.add_column("method", no_wrap=True)
    for header in ("last loss", "of lockstep's", "MB a step", "steps", "MB", *links):
        table.add_column(header, justify="right", no_wrap=True)
    for one in trainings:
        cost = one.cost_of(target)
        table.add_row(
            one.method,
            f"{one.last_loss:.3f}",
            f"{one.last_loss / trainings[0].last_loss - 1:+.1%}",
            f"{one.step_bytes[links[0]] / 1e6:.3f}",
            _number(None if cost is None else cost.steps),
            _number(None if cost is None else cost.num_bytes / 1e6),
            *(
                _seconds(one.seconds_to(target, link)) if link in one.step_s else "not timed"
                for link in links
            ),
        )
    return table


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:,.1f} s" if value < 10 else f"{value:,.0f} s"


def claims(trainings: Sequence[Training]) -> list[tuple[str, bool]]:
    """Returns claims about DiLoCo with their figures, and True for each that holds.

    Args:
        trainings: of all trials.
    """
    by_key = {(one.task, one.method): one for one in trainings}
    found: list[tuple[str, bool]] = []
    for task in dict.fromkeys(one.task for one in trainings):
        for method in _CLAIMED:
            lockstep, diloco = (by_key.get((task, name)) for name in ("lockstep", method))
            if lockstep is not None and diloco is not None:
                name = f"{task}, {method}"
                found += [(f"{name}: {words}", holds) for words, holds in _claims(lockstep, diloco)]
    return found


def _claims(lockstep: Training, diloco: Training) -> Generator[tuple[str, bool]]:
    ratio = lockstep.step_bytes[lockstep.own_link] / diloco.step_bytes[diloco.own_link]
    yield f"sends 1/{ratio:.1f} of the bytes", ratio >= _BYTES_RATIO
    worse = diloco.last_loss / lockstep.last_loss - 1
    yield f"its last loss is {worse:+.1%}", worse <= TOLERANCE
    target = target_loss([lockstep])
    times_s = [one.seconds_to(target, DRAWN_LINK) for one in (lockstep, diloco)]
    if times_s[0] is None or times_s[1] is None:
        yield "does not reach the loss", False
    else:
        speedup = times_s[0] / times_s[1]
        yield f"{speedup:.1f} times faster to the loss on {DRAWN_LINK}", speedup >= _SPEEDUP


def show_claims(console: Console, trainings: Sequence[Training]) -> None:
    """Prints what holds and what does not."""
    for words, holds in claims(trainings):
        console.print(f"{'holds' if holds else 'does not hold'}: {words}", markup=False)


def draw_curves(path: Path, trainings: Sequence[Training], subtitle: str) -> None:
    """Writes a picture: validation loss by steps, by seconds on a slow link, and by bytes."""
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.8), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    labels = ("steps", f"seconds on {DRAWN_LINK}", "MB sent by a worker")
    for place, (axes, label) in enumerate(zip(panels, labels, strict=True)):
        for one in trainings:
            if place == 1 and DRAWN_LINK not in one.step_s:
                continue
            x = [_x(one, point, place) for point in one.points]
            losses = [point.validation_loss for point in one.points]
            color = _COLORS[one.method]
            axes.plot(x, losses, color=color, linewidth=1.7, label=one.method)
        axes.axhline(target_loss(trainings), color="#888888", linewidth=1, linestyle="--")
        axes.set_xlabel(label)
        if place:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("validation loss")
    panels[0].legend(fontsize=8, frameon=False)
    title = f"{trainings[0].task}; dashed: {TOLERANCE:.0%} above the last loss of lockstep"
    figure.suptitle(f"{title}\n{subtitle}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _x(one: Training, point: Point, panel: int) -> float:
    if panel == 0:
        return point.steps
    return one.seconds_at(point, DRAWN_LINK) if panel == 1 else point.num_bytes / 1e6
