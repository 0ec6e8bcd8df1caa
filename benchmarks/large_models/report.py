"""Tables and the picture of compiled decoders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.large_models.cases import DECODERS, SIDES

__all__ = ["draw", "make_table", "read_results"]

_MIB = 2**20
_BEFORE = "before"
_COLORS = {
    "shard_state=all": "#2a78b8",
    "shard_state=optimizer": "#7fb2d9",
    "ModelParallel": "#c2410c",
    "ModelParallel 2D": "#d9a27f",
    "JAX": "#2f9e6e",
    _BEFORE: "#9ca3af",
}
_HEADERS = (
    "decoder",
    "machine",
    "policy",
    "blocks",
    "side",
    "arguments MiB",
    "temporaries MiB",
    "bytes a parameter",
    "all-gathers",
    "reduce-scatters",
    "all-reduces",
    "gathered MiB",
    "summed MiB",
    "lowering s",
    "compilation s",
)
Facts = Mapping[str, Any]


def read_results(folder: Path) -> list[Facts]:
    """Returns the results in a folder, sorted by decoder, machine, form and side."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    found = [one for one in found if "side" in one]
    order = [*DECODERS]
    return sorted(found, key=lambda one: (*_group(one, order), SIDES.index(one["side"])))


def _group(one: Facts, order: Sequence[str]) -> tuple[Any, ...]:
    form = (one["dtype"], not one["recomputes"], one["length"])
    return (order.index(one["decoder"]), one["machine"], *form)


def make_table(results: Iterable[Facts], earlier: Iterable[Facts] = ()) -> str:
    """Returns a Markdown table; results of an earlier revision are called "before".

    Args:
        results: of this revision.
        earlier: of the revision before; those of other sides are the same programs and left out.
    """
    order = [*DECODERS]
    old = [one | {"side": _BEFORE} for one in earlier if one["side"] == SIDES[0]]
    rows = sorted([*results, *old], key=lambda one: _group(one, order))
    lines = [_HEADERS, ("---",) * 5 + ("---:",) * (len(_HEADERS) - 5), *map(_row, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _row(one: Facts) -> tuple[str, ...]:
    blocks = "recomputed" if one["recomputes"] else "kept"
    head = (one["decoder"], one["machine"], one["dtype"], blocks, one["side"])
    times = (f"{one['lowering_s']:.1f}", f"{one['compile_s']:.1f}")
    if "refusal" in one:
        used = f"refused: {one['used_bytes'] / _MIB:,.0f} in all"
        return (*head, "", used, *("",) * 6, *times)
    messages, sizes = one["messages"], one["message_bytes"]
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    return (
        *head,
        f"{one['argument_bytes'] / _MIB:,.0f}",
        f"{one['temporary_bytes'] / _MIB:,.0f}",
        f"{one['temporary_bytes'] / one['num_parameters']:.2f}",
        *(f"{messages[kind]:,.0f}" for kind in kinds),
        f"{sizes['all-gather'] / _MIB:,.0f}",
        f"{(sizes['reduce-scatter'] + sizes['all-reduce']) / _MIB:,.0f}",
        *times,
    )


def draw(path: Path, results: Iterable[Facts], earlier: Iterable[Facts] = ()) -> None:
    """Writes a picture of temporary memory against the number of equal layers.

    Args:
        path: of the picture.
        results: of this revision; without equal layers nothing is written.
        earlier: of the revision before.
    """
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    old = [one | {"side": _BEFORE} for one in earlier if one["side"] == SIDES[0]]
    found = [one for one in (*results, *old) if _is_drawn(one)]
    forms = sorted(
        {(one["dtype"], one["recomputes"]) for one in found}, key=lambda form: not form[1]
    )
    if not forms:
        return
    figure = Figure(figsize=(max(7.0, 4.2 * len(forms)), 3.6), layout="constrained")
    panels = figure.subplots(1, len(forms), squeeze=False, sharey=True)[0]
    for axes, form in zip(panels, forms, strict=True):
        _draw_form(axes, [one for one in found if (one["dtype"], one["recomputes"]) == form])
        axes.set_title(f"{form[0]}, blocks {'recomputed' if form[1] else 'kept'}", fontsize=10)
    panels[0].set_ylabel("temporary memory of a device, MiB", fontsize=9)
    handles = {
        label: line
        for axes in panels
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=5,
        fontsize=8,
        frameon=False,
    )
    figure.suptitle(
        "decoders of equal layers of 67 million parameters, compiled for eight v5e", fontsize=11
    )
    figure.savefig(path, dpi=150)


def _is_drawn(one: Facts) -> bool:
    return one["decoder"].endswith(" layers") and "refusal" not in one


def _draw_form(axes: Any, found: Sequence[Facts]) -> None:
    for side, color in _COLORS.items():
        points = sorted(
            (int(one["decoder"].split()[0]), one["temporary_bytes"] / _MIB)
            for one in found
            if one["side"] == side
        )
        if points:
            style = "--" if side == _BEFORE else "-"
            axes.plot(*zip(*points, strict=True), style, marker="o", color=color, label=side)
    axes.set_xticks(sorted({int(one["decoder"].split()[0]) for one in found}))
    axes.set_xlabel("layers", fontsize=9)
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
