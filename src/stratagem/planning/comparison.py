"""Predicted parts of a step beside those that a profile measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from stratagem.messages import explain
from stratagem.observe.profiling.summary import ProfileSummary
from stratagem.observe.profiling.trace_files import read_profile
from stratagem.planning.step_time import StepTime

# Parts of a profile that a plan does not predict.
_UNPREDICTED = ("copies", "input", "compilation", "host")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedPart:
    """A part of a step, predicted and measured.

    Args:
        name: "compute", "collectives", "launch", a part that only a profile has, or "step".
        predicted_s: predicted seconds; None if plans do not predict it.
        measured_s: measured seconds of a step, as a mean over steps and devices.

    Example:
        >>> part = sg.planning.ComparedPart(name="compute", predicted_s=0.03, measured_s=0.04)
        >>> round(part.ratio, 2)
        0.75

    Source: specific to Stratagem.
    """

    name: str
    predicted_s: float | None
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Predicted divided by measured seconds; None without either."""
        if self.predicted_s is None or not self.measured_s:
            return None
        return self.predicted_s / self.measured_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan beside a profile.

    Args:
        parts: the parts, and last the whole step.
        notes: differences between what was planned and what was profiled.

    Example:
        >>> step = sg.planning.ComparedPart(name="step", predicted_s=0.03, measured_s=0.04)
        >>> sg.planning.Comparison(parts=(step,), notes=()).step.measured_s
        0.04

    Source: specific to Stratagem.
    """

    parts: tuple[ComparedPart, ...]
    notes: tuple[str, ...]

    @property
    def step(self) -> ComparedPart:
        """The whole step."""
        return self.parts[-1]

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as numbers, strings, lists and dicts, ready for JSON.

        Returns:
            The parts, with their ratios, and the notes.
        """
        parts = [{**dataclasses.asdict(part), "ratio": part.ratio} for part in self.parts]
        return {"parts": parts, "notes": list(self.notes)}


def compare(step: StepTime, platform: str, profile: ProfileSummary | str | Path) -> Comparison:
    """Compares a predicted step on a platform with a profile; see `Plan.compare`."""
    summary = profile if isinstance(profile, ProfileSummary) else read_profile(profile)
    if not summary.num_steps:
        raise ValueError(
            explain(
                "The profile has no marks of steps, so the time of one step is unknown.",
                expected="a profile taken by sg.profile.",
                fix="profile fit or a loop of strategy.run with sg.profile.",
            )
        )
    measured = {name: part_s / summary.num_steps for name, part_s in summary.parts_s.items()}
    predicted = {
        "compute": step.compute_s,
        "collectives": step.reduction_s - step.hidden_s,
        "launch": step.launch_s,
    }
    parts = [
        ComparedPart(name=name, predicted_s=seconds, measured_s=measured[name])
        for name, seconds in predicted.items()
    ]
    parts += [
        ComparedPart(name=name, predicted_s=None, measured_s=measured[name])
        for name in _UNPREDICTED
        if measured[name]
    ]
    parts.append(ComparedPart(name="step", predicted_s=step.step_s, measured_s=summary.step_s))
    return Comparison(parts=tuple(parts), notes=tuple(_notes(step, platform, summary)))


def _notes(step: StepTime, platform: str, summary: ProfileSummary) -> list[str]:
    notes: list[str] = []
    if summary.platform != platform:
        notes.append(f"Measured on {summary.platform.upper()}, planned for {platform.upper()}.")
    if summary.num_devices > step.num_devices:
        notes.append(
            f"Measured on {summary.num_devices} devices of a process, planned for "
            f"{step.num_devices}."
        )
    return notes
