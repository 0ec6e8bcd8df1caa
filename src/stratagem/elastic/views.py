"""Views of an elastic group, and the decision that ends one view and begins the next.

Members combine values in rounds. A round ends with a barrier, which a member enters once it has all
values of the round. Therefore:

- A member that has committed a round proves that every other member has all its values.
- If any member lacks a value, no member has committed.

So what the members of a broken view report decides for all whether its last round counts.

Source: Birman and Joseph, Exploiting virtual synchrony in distributed systems, 1987.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

__all__ = ["Report", "View", "next_view"]


@dataclasses.dataclass(frozen=True)
class View:
    """The members between two changes: process ids, ascending.

    `num_rounds` rounds were committed when it began. With backup workers, some members may lack the
    values of the last ones: `behind` pairs each with the number of rounds that it has.
    """

    number: int
    members: tuple[int, ...]
    num_rounds: int = 0
    behind: tuple[tuple[int, int], ...] = ()

    def rank(self, member: int) -> int:
        """Returns the place of a member among all."""
        return self.members.index(member)


@dataclasses.dataclass(frozen=True)
class Report:
    """State of a member whose view is broken.

    `is_complete` is True if it has all values of the round after its last committed one, in which
    `participants` take part: all members if it is empty. `num_backups` members may be left out.
    """

    member: int
    view: int
    num_rounds: int
    is_complete: bool
    participants: Sequence[int] = ()
    num_backups: int = 0


def next_view(reports: Sequence[Report]) -> View:
    """Returns the view of the members that report.

    A member whose number of committed rounds is below that of the view commits its complete round.
    Raises RuntimeError if the reports contradict each other.
    """
    most = max(report.num_rounds for report in reports)
    complete = [one for one in reports if one.num_rounds == most and one.is_complete]
    takes_part = set(complete[0].participants) if complete else set[int]()
    concerned = [one for one in reports if not takes_part or one.member in takes_part]
    if all(one in complete for one in concerned):
        most += 1
    behind = [
        report
        for report in reports
        if report.num_rounds != most and not (report.num_rounds == most - 1 and report.is_complete)
    ]
    num_backups = {report.num_backups for report in reports}
    if len(num_backups) > 1 or (behind and num_backups == {0}):
        raise RuntimeError(
            f"Members of an elastic group reported states that exclude each other: {reports}."
        )
    members = tuple(sorted(report.member for report in reports))
    lacking = tuple(sorted((report.member, report.num_rounds) for report in behind))
    return View(max(report.view for report in reports) + 1, members, most, lacking)
