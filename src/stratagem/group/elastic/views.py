"""Views of an elastic group, and the decision that ends one view and begins the next.

A round ends with a barrier, which a member enters once it has all values of the round. Therefore a
member that has committed a round proves that every other one has all its values; and if any lacks a
value, none has committed. So what the members of a broken view report decides for all whether its
last round counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.errors import UnavailableError, explain


@dataclasses.dataclass(frozen=True)
class View:
    """The members between two changes: process ids, ascending.

    `num_rounds` rounds were committed when it began. `incarnations` are those of the members, in
    their order; empty before the first view. `newcomers` are members without the state of the
    others. `is_change_due` announces another change at the next safe point.
    """

    number: int
    members: tuple[int, ...]
    num_rounds: int = 0
    incarnations: tuple[int, ...] = ()
    newcomers: tuple[int, ...] = ()
    is_change_due: bool = False

    @property
    def expected(self) -> dict[int, int]:
        """The incarnation of each member."""
        return dict(zip(self.members, self.incarnations, strict=True))

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> View:
        """Returns the view of a received message; raises TypeError for other fields."""
        fields: dict[str, Any] = {name: _immutable(value) for name, value in message.items()}
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class Report:
    """State of a member whose view is broken, or ends to admit others.

    `is_complete` is True if it has all values of the round after its last committed one. `is_new`
    is True if it has not completed its first round, in which it receives the state of the others.
    """

    member: int
    view: int
    num_rounds: int
    is_complete: bool
    incarnation: int = 0
    is_new: bool = False


def next_view(reports: Sequence[Report]) -> View:
    """Returns the view of the members that report.

    A member whose number of committed rounds is below that of the view commits its complete round.
    Raises RuntimeError if the reports contradict each other, UnavailableError if no member is left
    that has the state.
    """
    if all(report.is_new for report in reports):
        raise UnavailableError(
            explain(
                "All members that had the values of variables were lost before a process that "
                "joined had received them.",
                expected="one member that is left.",
                fix="start all processes again.",
                code="SG506",
            )
        )
    most = max(report.num_rounds for report in reports)
    if all(report.num_rounds == most and report.is_complete for report in reports):
        most += 1
    if not all(
        report.num_rounds == most or (report.num_rounds == most - 1 and report.is_complete)
        for report in reports
    ):
        raise RuntimeError(
            f"Members of an elastic group reported states that exclude each other: {reports}."
        )
    incarnations = {report.member: report.incarnation for report in reports}
    members = tuple(sorted(incarnations))
    return View(
        max(report.view for report in reports) + 1,
        members,
        most,
        tuple(incarnations[member] for member in members),
        tuple(sorted(one.member for one in reports if one.is_new and one.num_rounds == most)),
    )


def _immutable(value: object) -> object:
    return tuple(map(_immutable, value)) if isinstance(value, list) else value


def with_newcomers(view: View, candidates: Mapping[int, int]) -> View:
    """Returns a view with candidates, given by their incarnations, as members without the state."""
    expected = view.expected | dict(candidates)
    members = tuple(sorted(expected))
    return dataclasses.replace(
        view,
        members=members,
        incarnations=tuple(expected[member] for member in members),
        newcomers=tuple(sorted({*view.newcomers, *candidates})),
    )


def change_text(before: View, after: View, labels: Sequence[str]) -> str:
    """Returns a text about a change of the members, without its end."""
    old, new = before.expected.items(), after.expected.items()
    lost = [labels[one] for one, _ in sorted(old - new)]
    joined = [labels[one] for one, _ in sorted(new - old)]
    texts = [f"Lost {', '.join(lost)}"] if lost else []
    texts += [f"{', '.join(joined)} joined"] if joined else []
    text = "; ".join(texts) or "Lost a connection, and no member"
    return f"{text}: {len(after.members)} of {len(labels)} continue"
