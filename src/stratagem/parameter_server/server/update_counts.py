"""Counts of a server's updates by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stratagem.group.transport.wire import Message

# Subtracting counts as adding. One synchronous update is several pushes.
KINDS: tuple[str, ...] = ("assign", "assign_add", "scatter", "scatter_add", "push")
_PLACES = {kind: place for place, kind in enumerate(KINDS)}


def kind_of(message: Message) -> str | None:
    """Returns the kind of an update; None for another request."""
    if message.kind == "push":
        return "push"
    if message.kind not in ("assign", "scatter"):
        return None
    return f"{message.kind}_add" if message.fields.get("sign") else message.kind


class UpdateCounts:
    """Updates by kind. Callers serialize changes.

    `resent` counts copies of a request that arrived after it was carried out or while it was;
    `repeated` counts updates of a function that ran again. Neither was applied again.
    """

    def __init__(self) -> None:
        self._applied = [0] * len(KINDS)
        self.resent: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()

    @property
    def applied(self) -> Counter[str]:
        """Applied updates."""
        return +Counter(dict(zip(KINDS, self._applied, strict=True)))

    def note_applied(self, kind: str) -> None:
        """Counts an applied update."""
        self._applied[_PLACES[kind]] += 1

    def numbers(self) -> list[int]:
        """Returns the numbers of applied updates of `KINDS`, for answers."""
        return self._applied.copy()

    def saved(self) -> dict[str, list[int]]:
        """Returns all counts by outcome, each in the order of `KINDS`, for a journal."""
        counts = {"resent": self.resent, "repeated": self.repeated}
        others = {name: [one[kind] for kind in KINDS] for name, one in counts.items()}
        return {"applied": self.numbers(), **others}

    def restore(self, saved: Mapping[str, Sequence[int]]) -> None:
        """Restores the result of `saved` from a journal."""
        counts = {
            name: Counter({kind: int(n) for kind, n in zip(KINDS, saved[name], strict=True)})
            for name in ("applied", "resent", "repeated")
        }
        self._applied = [counts["applied"][kind] for kind in KINDS]
        self.resent, self.repeated = +counts["resent"], +counts["repeated"]

    def described(self) -> dict[str, Mapping[str, int]]:
        """Returns all counts, by outcome and kind."""
        return {
            "applied": dict(self.applied),
            "resent": dict(self.resent),
            "repeated": dict(self.repeated),
        }
