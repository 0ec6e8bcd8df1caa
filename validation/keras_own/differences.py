"""The list of Keras's own tests that differ under a strategy, and its comparison with outcomes.

A test differs if it passes in plain Keras and does not pass in the scope of a strategy. Plain
Keras is run beside the strategies, because what it fails is a matter of the machine: of the
libraries that are installed, and of what can be downloaded.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

UNEXPLAINED = "unexplained"

# Why a test differs, by strategy and test.
Reasons = Mapping[tuple[str, str], str]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What one strategy's outcomes say about the list.

    `differing` are all tests that differ. Of them `new` are not listed, or without a reason;
    `mended` are listed and do not differ.
    """

    outcomes: Mapping[str, str]
    differing: Collection[str]
    new: Collection[str]
    mended: Collection[str]
    num_plain: int

    @property
    def is_as_listed(self) -> bool:
        """Whether the list is true."""
        return not self.new and not self.mended

    def summary(self, name: str) -> str:
        """One line, in which what fails is what the list does not explain."""
        count = Counter(self.outcomes.values())
        listed = len(self.differing) - len(self.new)
        return (
            f"{name}: {count['passed']} passed, {len(self.new) + len(self.mended)} failed, "
            f"{count['skipped']} skipped; {listed} differ as listed, {self.num_plain} fail in "
            "plain Keras as well"
        )


def compare(
    name: str, plain: Mapping[str, str], outcomes: Mapping[str, str], reasons: Reasons
) -> Comparison:
    """Compares a strategy's outcomes with plain Keras's and with the list.

    A test that a strategy skips, or of which nothing was heard, differs like one that fails.
    """
    differing = {
        test
        for test, outcome in plain.items()
        if outcome == "passed" and outcomes.get(test) != "passed"
    }
    listed = {test: reason for (strategy, test), reason in reasons.items() if strategy == name}
    explained = {test for test, reason in listed.items() if reason != UNEXPLAINED}
    num_plain = sum(
        outcome == "failed" and outcomes.get(test) == "failed" for test, outcome in plain.items()
    )
    return Comparison(
        outcomes,
        differing,
        sorted(differing - explained),
        sorted(set(listed) - differing),
        num_plain,
    )


def read(text: str) -> Reasons:
    """Reads the list."""
    reasons: dict[tuple[str, str], str] = {}
    for entry in tomllib.loads(text).get("difference", []):
        for strategy in entry["strategies"]:
            for test in entry["tests"]:
                if (strategy, test) in reasons:
                    raise ValueError(f"{test} is listed twice for {strategy}")
                reasons[strategy, test] = entry["reason"]
    return reasons


def recorded(reasons: Reasons, comparisons: Mapping[str, Comparison]) -> Reasons:
    """The list as it would be true: reasons that are known stay, new differences have none yet."""
    kept = {key: reason for key, reason in reasons.items() if key[0] not in comparisons}
    for name, comparison in comparisons.items():
        for test in comparison.differing:
            kept[name, test] = reasons.get((name, test), UNEXPLAINED)
    return kept


def write(reasons: Reasons) -> str:
    """The list as text: one entry for each reason and set of strategies."""
    strategies: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (strategy, test), reason in sorted(reasons.items()):
        strategies[reason, test].append(strategy)
    entries: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (reason, test), names in sorted(strategies.items()):
        entries[reason, tuple(names)].append(test)
    lines = [
        "# Keras's own tests that differ under a strategy, and why.",
        "# `make test-external NAME=keras` holds this list; with ARGS=--record it writes it anew",
        "# and keeps the reasons.",
    ]
    for (reason, names), tests in entries.items():
        lines += ["", "[[difference]]", f"reason = {_quoted(reason)}"]
        lines += [f"strategies = [{', '.join(map(_quoted, names))}]", "tests = ["]
        lines += [f"    {_quoted(test)}," for test in tests] + ["]"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
