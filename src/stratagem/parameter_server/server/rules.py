"""The optimizers of a server's variables, each with what it keeps once."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from stratagem.messages import explain
from stratagem.parameter_server.server.updates import UpdateRule, is_kept_by, kept_name, own_name

__all__ = ["Rules"]


class Rules:
    """Optimizers by name. One thread at a time changes it."""

    def __init__(self) -> None:
        self._rules: dict[str, UpdateRule] = {}
        self._scalars: dict[str, dict[str, np.ndarray]] = {}

    @property
    def names(self) -> list[str]:
        """Names of all optimizers."""
        return list(self._rules)

    @property
    def scalars(self) -> dict[str, np.ndarray]:
        """Scalars of the optimizers, by `kept_name`."""
        return {
            kept_name(optimizer, name): value
            for optimizer, own in self._scalars.items()
            for name, value in own.items()
        }

    def set(self, optimizer: str, rule: UpdateRule) -> None:
        """Notes an optimizer, unless it is there.

        Args:
            optimizer: its name.
            rule: how it applies gradients.

        Raises:
            ValueError: there is another one of that name.
        """
        known = self._rules.get(optimizer)
        if known is not None and known.describe() != rule.describe():
            raise ValueError(
                explain(
                    f"These variables are to be trained by {rule.describe()}.",
                    expected=f"the optimizer that they were trained by: {known.describe()}.",
                    fix="use the optimizer that the journal or the first client had, give the new "
                    "one another name, or start the servers anew.",
                )
            )
        if known is None:
            self._scalars[optimizer] = dict(rule.scalars())
        self._rules[optimizer] = rule

    def find(self, optimizer: str, names: Collection[str]) -> UpdateRule:
        """Returns an optimizer.

        Args:
            optimizer: its name.
            names: of variables whose gradients came.

        Raises:
            RuntimeError: there is none of that name.
        """
        rule = self._rules.get(optimizer)
        if rule is None:
            raise RuntimeError(
                explain(
                    f"Gradients of {[*names]} came before an optimizer.",
                    expected="an optimizer that was built for these variables.",
                    fix="let the coordinator compile the model, or build the optimizer.",
                )
            )
        return rule

    def scalars_of(self, optimizer: str) -> Mapping[str, np.ndarray]:
        """Returns what an optimizer keeps once, by its own names.

        Args:
            optimizer: its name.
        """
        return self._scalars[optimizer]

    def keep(self, optimizer: str, scalars: Mapping[str, np.ndarray]) -> None:
        """Takes what an optimizer keeps once.

        Args:
            optimizer: its name.
            scalars: by its own names.
        """
        self._scalars[optimizer] = dict(scalars)

    def set_scalar(self, name: str, value: np.ndarray) -> None:
        """Sets one of the scalars.

        Args:
            name: by `kept_name`.
            value: its value.

        Raises:
            KeyError: no such scalar.
        """
        for optimizer, own in self._scalars.items():
            key = own_name(optimizer, name)
            if is_kept_by(optimizer, name) and key in own:
                self._scalars[optimizer] = {**own, key: np.array(value, own[key].dtype)}
                return
        raise KeyError(f"no scalar {name!r} on this server")

    def drop(self, optimizer: str) -> None:
        """Forgets an optimizer.

        Args:
            optimizer: its name.
        """
        self._rules.pop(optimizer, None)
        self._scalars.pop(optimizer, None)
