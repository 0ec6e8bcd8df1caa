"""How late gradients were, as a picture."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_COLOR = "#2a78b8"
_WIDTH_IN, _HEIGHT_IN = 7, 3.6


def draw_staleness(path, counts, title):
    """Writes a picture: a bar for each number of updates that gradients were late.

    Args:
        path: of the picture; its folder is made.
        counts: of each such number, how many pushes there were.
        title: what stands above it.
    """
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    axes = figure.subplots()
    total = sum(counts.values())
    late = range(max(counts, default=0) + 1)
    shares = [counts.get(one, 0) / max(1, total) for one in late]
    axes.bar(late, shares, width=0.8, color=_COLOR)
    for one, share in zip(late, shares, strict=True):
        if share >= 0.0005:
            axes.text(one, share, f"{share:.1%}", ha="center", va="bottom", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_ylim(0, 1.12 * max([*shares, 0.01]))
    axes.set_xlabel("updates that a server had made since the values were read")
    axes.set_ylabel(f"part of {total:,} pushes")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
