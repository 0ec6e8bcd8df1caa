"""Registry of a server's optimizers and their scalars."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from stratagem.messages import explain
from stratagem.parameter_server.server.updates import (
    UpdateRule,
    is_stored_by,
    own_name,
    stored_name,
)


class Rules:
    """Optimizers by name. Callers serialize changes.

    A journal has only the descriptions and scalars of optimizers, never their code: after a restart
    clients send the optimizers again.
    """

    def __init__(self) -> None:
        self._rules: dict[str, UpdateRule] = {}
        self._descriptions: dict[str, Any] = {}
        self._scalars: dict[str, dict[str, np.ndarray]] = {}

    @property
    def names(self) -> list[str]:
        """Names of all optimizers."""
        return list(self._descriptions)

    @property
    def descriptions(self) -> dict[str, Any]:
        """Descriptions of all optimizers by name, as JSON values."""
        return dict(self._descriptions)

    def missing(self, optimizers: Iterable[str]) -> list[str]:
        """Returns those of `optimizers` that a journal described and no client has sent since."""
        if len(self._rules) == len(self._descriptions):
            return []
        return [
            name
            for name in dict.fromkeys(optimizers)
            if name in self._descriptions and name not in self._rules
        ]

    def restore(self, descriptions: Mapping[str, Any], scalars: Mapping[str, np.ndarray]) -> None:
        """Restores descriptions and scalars (by `stored_name`) from a journal."""
        self._descriptions = dict(descriptions)
        self._rules = {name: one for name, one in self._rules.items() if name in descriptions}
        self._scalars = {
            optimizer: {
                own_name(optimizer, name): np.array(value)
                for name, value in scalars.items()
                if is_stored_by(optimizer, name)
            }
            for optimizer in descriptions
        }

    @property
    def scalars(self) -> dict[str, np.ndarray]:
        """Scalars of all optimizers, by `stored_name`."""
        return {
            stored_name(optimizer, name): value
            for optimizer, own in self._scalars.items()
            for name, value in own.items()
        }

    def set(self, optimizer: str, rule: UpdateRule) -> None:
        """Registers an optimizer. Raises ValueError if the name belongs to a different one."""
        known, description = self._descriptions.get(optimizer), _as_json(rule.describe())
        if known is not None and known != description:
            raise ValueError(
                explain(
                    f"Cannot train these variables with {description}: the servers already "
                    "have another optimizer with this name.",
                    expected=f"the existing optimizer: {known}.",
                    fix="use the optimizer of the journal or of the first client, rename the new "
                    "one, or restart the servers with empty journals.",
                    code="SG610",
                )
            )
        if known is None:
            self._scalars[optimizer] = dict(rule.scalars())
        self._rules[optimizer], self._descriptions[optimizer] = rule, description

    def find(self, optimizer: str, names: Collection[str]) -> UpdateRule:
        """Returns an optimizer, or raises RuntimeError if there is none.

        `names` are the variables of the push, for the message.
        """
        rule = self._rules.get(optimizer)
        if rule is None:
            raise RuntimeError(
                explain(
                    f"Gradients of {[*names]} were pushed before an optimizer was set.",
                    expected="an optimizer that was built for these variables.",
                    fix="compile the model on the coordinator, or build the optimizer.",
                )
            )
        return rule

    def scalars_of(self, optimizer: str) -> Mapping[str, np.ndarray]:
        """Returns the scalars of an optimizer, by its own names."""
        return self._scalars[optimizer]

    def keep(self, optimizer: str, scalars: Mapping[str, np.ndarray]) -> None:
        """Replaces the scalars of an optimizer, by its own names."""
        self._scalars[optimizer] = dict(scalars)

    def set_scalar(self, name: str, value: np.ndarray) -> None:
        """Sets a scalar, by `stored_name`. Raises KeyError if there is none."""
        for optimizer, own in self._scalars.items():
            key = own_name(optimizer, name)
            if is_stored_by(optimizer, name) and key in own:
                self._scalars[optimizer] = {**own, key: np.array(value, own[key].dtype)}
                return
        raise KeyError(f"no scalar {name!r} on this server")

    def drop(self, optimizer: str) -> None:
        """Removes an optimizer and its scalars."""
        self._rules.pop(optimizer, None)
        self._descriptions.pop(optimizer, None)
        self._scalars.pop(optimizer, None)


def _as_json(description: Mapping[str, Any]) -> Any:
    """Returns a description as a journal returns it."""
    return json.loads(json.dumps(description, default=repr))
