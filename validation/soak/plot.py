"""Plot of a soak: a panel for each resource, a line for each role."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from validation.soak.growth import RESOURCES
from validation.soak.sampling import Sample

__all__ = ["draw"]

_TITLES = {
    "memory_bytes": "memory (MiB)",
    "num_descriptors": "descriptors",
    "num_threads": "threads",
    "num_files": "files",
}


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draws all series into a PNG file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(RESOURCES), 1, figsize=(9, 11), sharex=True)
    for panel, resource in zip(panels, RESOURCES, strict=True):
        series: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            if getattr(sample, resource):
                series[sample.role].append(sample)
        for role, values in sorted(series.items()):
            scale = 2**20 if resource == "memory_bytes" else 1
            panel.plot(
                [one.time_s / 60 for one in values],
                [getattr(one, resource) / scale for one in values],
                label=role.rpartition("/")[2],
                linewidth=1,
            )
        panel.set_ylabel(_TITLES[resource])
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, ncols=4, loc="lower right")
    panels[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
