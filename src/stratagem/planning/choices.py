"""The result of a search: the best candidates, as data and as a table."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.logs import as_text, size_text
from stratagem.planning.candidates import Estimate, PlanCandidate
from stratagem.planning.result import Plan, time_text
from stratagem.planning.targets import Target


@dataclasses.dataclass(frozen=True)
class PlanChoice:
    """A candidate with its estimate and, if it was compiled, its plan, whose figures count.

    Args:
        candidate: mesh, sharded state, rematerialization and precision.
        estimate: figures by arithmetic.
        target: the machine.
        plan: the plan of the compiled step, or None.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> batch = np.ones((16, 8)), np.ones((16, 2))
        >>> choice = sg.planning.search(model, batch, "2xH100", compiles=False).best
        >>> choice.code, choice.fits
        ('strategy = sg.MirroredStrategy()', True)

    Source: specific to Stratagem.
    """

    candidate: PlanCandidate
    estimate: Estimate
    target: Target
    plan: Plan | None = None

    @property
    def memory_bytes(self) -> float:
        """Memory of a device at the peak of a step."""
        return self.estimate.memory_bytes if self.plan is None else self.plan.memory.total_bytes

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.estimate.step_s if self.plan is None else self.plan.step.step_s

    @property
    def mfu(self) -> float:
        """Products without recomputation, as a share of the peak of all devices."""
        return self.estimate.mfu * self.estimate.step_s / self.step_s if self.step_s else 0.0

    @property
    def fits(self) -> bool:
        """True if a device has the memory."""
        return self.estimate.fits if self.plan is None else self.plan.fits

    @property
    def limit(self) -> str:
        """The part that takes longest: compute, collectives or the host link; or memory."""
        if not self.fits:
            return "memory"
        if self.plan is None or self.estimate.limit == "host link":
            return self.estimate.limit
        parts = [name for name in self.estimate.seconds if name.startswith("collectives")]
        step = self.plan.step
        return parts[0] if step.reduction_s > step.compute_s + step.launch_s else "compute"

    @property
    def code(self) -> str:
        """The code that gives it."""
        return self.candidate.code

    def to_dict(self) -> dict[str, Any]:
        """Returns numbers and strings, ready for JSON."""
        replicas, shards, size = self.candidate.mesh
        return {
            "code": self.code,
            "mesh": {"replica": replicas, "shard": shards, "model": size},
            "shard_state": self.candidate.shard_state,
            "remat": self.candidate.form.remat,
            "precision": self.candidate.form.precision,
            "memory_bytes": round(self.memory_bytes),
            "step_s": self.step_s,
            "mfu": self.mfu,
            "fits": self.fits,
            "limit": self.limit,
            "seconds": dict(self.estimate.seconds),
            "estimated_memory_bytes": round(self.estimate.memory_bytes),
            "estimated_step_s": self.estimate.step_s,
            "is_compiled": self.plan is not None,
        }


@dataclasses.dataclass(frozen=True)
class PlanSearch:
    """Result of a search.

    Args:
        title: name of the model or script.
        target: the machine.
        global_batch: number of examples over all devices.
        choices: the best ones, the fastest that fits first.
        num_candidates: number of candidates that were ranked.
        notes: further remarks.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> batch = np.ones((16, 8)), np.ones((16, 2))
        >>> found = sg.planning.search(model, batch, "2xH100", compiles=False)
        >>> found.best.fits, found.num_candidates, len(found.choices)
        (True, 6, 5)

    Source: specific to Stratagem.
    """

    title: str
    target: Target
    global_batch: int
    choices: tuple[PlanChoice, ...]
    num_candidates: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return as_text([self.headline, _table(self), *_lines(self)])

    @property
    def best(self) -> PlanChoice:
        """The first choice."""
        return self.choices[0]

    @property
    def headline(self) -> str:
        """One line with the model, the machine and the batch."""
        fits = "" if self.best.fits else " None of them fits."
        return (
            f"{self.title} on {self.target.name}, global batch {self.global_batch}: the best "
            f"{len(self.choices)} of {self.num_candidates} settings.{fits}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns numbers, strings, lists and dicts, ready for JSON."""
        return {
            "title": self.title,
            "target": self.target.name,
            "global_batch": self.global_batch,
            "num_candidates": self.num_candidates,
            "choices": [one.to_dict() for one in self.choices],
            "notes": list(self.notes),
        }


def show_search(found: PlanSearch, console: Console | None = None) -> None:
    """Prints the result of a search."""
    console = console or Console(highlight=False)
    console.print(Text(found.headline), style="bold")
    console.print(_table(found))
    console.print(*map(Text, _lines(found)), sep="\n", soft_wrap=True)


def _table(found: PlanSearch) -> Table:
    table = Table()
    for name in ("", "mesh", "state", "remat", "precision"):
        table.add_column(name, no_wrap=True)
    for name in ("memory", "step", "MFU"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, one in enumerate(found.choices, 1):
        form = one.candidate.form
        table.add_row(
            str(number),
            " x ".join(map(str, one.candidate.mesh)),
            one.candidate.shard_state or "replicated",
            form.remat or "-",
            form.precision or "-",
            size_text(round(one.memory_bytes)),
            time_text(one.step_s),
            f"{one.mfu:.0%}",
        )
    return table


def _lines(found: PlanSearch) -> list[str]:
    is_compiled = any(one.plan is not None for one in found.choices)
    how = "of the compiled steps" if is_compiled else "estimates"
    return [
        *(f"{n}  {one.code}  # limit: {one.limit}" for n, one in enumerate(found.choices, 1)),
        "- Mesh: copies of the state x shards of a copy x devices of a replica. '-' is what the "
        f"script has. Figures are {how}, nothing is measured.",
        *(f"- {note}" for note in found.notes),
    ]
