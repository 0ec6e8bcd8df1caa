"""Heat maps of bandwidth and round trips between hosts, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stratagem.cli.doctor.network.survey import Matrix, Survey
from stratagem.environment import load

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# More cells have no room for a number.
_MAX_NUMBERED = 12
_INCHES_PER_HOST = 0.75


def draw(survey: Survey, path: Path) -> None:
    """Writes the picture to a file; the extension selects the format.

    Raises ImportError without matplotlib, ValueError for an unsupported format, and OSError if the
    file cannot be written.
    """
    figure = figure_of(survey)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def figure_of(survey: Survey) -> Figure:
    """Returns a matplotlib figure: bandwidth on the left, round trips on the right."""
    module = load(
        "matplotlib.figure", needed_by="The picture of a cluster", install="'stratagem[observe]'"
    )
    side_in = 2.5 + _INCHES_PER_HOST * min(len(survey.hosts), _MAX_NUMBERED)
    figure = module.Figure(figsize=(2 * side_in, side_in), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_matrix(left, "Bandwidth, MB/s", survey, survey.bytes_per_s, 1e-6, "viridis")
    _draw_matrix(right, "Round trip, ms", survey, survey.round_trip_s, 1e3, "viridis_r")
    return figure


def _draw_matrix(
    axes: Axes, title: str, survey: Survey, matrix: Matrix, scale: float, colors: str
) -> None:
    values = scale * np.array(
        [[np.nan if cell is None else cell for cell in row] for row in matrix]
    )
    axes.set_facecolor("#dddddd")
    image = axes.imshow(values, cmap=colors, vmin=0.0)
    size = len(survey.hosts)
    axes.set_xticks(range(size), survey.names, rotation=45, ha="right")
    axes.set_yticks(range(size), survey.names)
    axes.set(title=title, xlabel="to", ylabel="from")
    if size > _MAX_NUMBERED:
        axes.figure.colorbar(image, ax=axes)
        return
    highest = np.nanmax(values, initial=0.0)
    for one, other in np.ndindex(values.shape):
        value = values[one, other]
        if np.isnan(value):
            text, color = ("" if one == other else "no\nconnection"), "#a00000"
        else:
            is_light = (value > 0.6 * highest) == (colors == "viridis")
            text, color = (
                f"{value:.0f}" if value >= 1000 else f"{value:.3g}",
                "black" if is_light else "white",
            )
        axes.text(other, one, text, ha="center", va="center", color=color, fontsize=9)
