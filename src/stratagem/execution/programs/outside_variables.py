"""Variables of no strategy that the steps of an elastic group use.

A process that joins receives the values of those that its steps use by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from stratagem.messages import explain
from stratagem.variables.registry import home_of


class OutsideVariables:
    """Variables of no strategy, in the order of their first use."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._is_complete = False

    def __iter__(self) -> Iterator[Any]:
        for reference in self._references:
            variable = reference()
            if variable is not None:
                yield variable

    def end(self) -> None:
        """Refuses others from now on: this process has joined, and received the values of these."""
        self._is_complete = True

    def note(self, variables: Sequence[Any], name: str) -> None:
        """Notes those of a step's variables; raises ValueError for others after `end`."""
        for variable in variables:
            if home_of(variable) is not None or any(variable is one for one in self):
                continue
            if self._is_complete:
                raise ValueError(
                    explain(
                        f"{name} uses variable {variable.path!r}, which was made outside of the "
                        "strategy's scope. This process joined the others, and did not receive "
                        "its value.",
                        expected="a variable of the strategy, or of a step that was compiled "
                        "before joining.",
                        fix="make it in strategy.scope(); an optimizer has variables as well. Or "
                        "pass the step to strategy.admit(fn, args).",
                    )
                )
            self._references.append(weakref.ref(variable))
