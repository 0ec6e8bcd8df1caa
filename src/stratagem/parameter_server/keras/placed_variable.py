"""Keras variables whose store is chosen when they are initialized."""

from __future__ import annotations

from typing import Any

from stratagem.keras.variables.variable import DistributedVariable
from stratagem.parameter_server.keras.variable import ParameterServerVariable
from stratagem.variables import Home, VariableKind

__all__ = ["PlacedVariable"]


class PlacedVariable(DistributedVariable):
    """A Keras variable without a store yet: placement rules need its path and shape.

    Created by `keras.Variable`, with its arguments. Creation changes its class to
    `ParameterServerVariable` or `DistributedVariable`: in a step its initial value comes later, but
    an optimizer of that step needs to know already if it is remote.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self) is PlacedVariable:
            self._become_what_the_rules_say()

    def _initialize_with_initializer(self, initializer: Any) -> None:
        self._become_what_the_rules_say()
        self._initialize_with_initializer(initializer)

    def settle(self, home: Home, value: Any) -> None:
        """Moves a variable that joins the strategy to the store chosen by the rules."""
        self._home = home
        self._become_what_the_rules_say()
        self.settle(home, value)

    def _become_what_the_rules_say(self) -> None:
        # Counters and learning rates stay in this process, which sends them to the servers.
        may_be_served = (
            self._home.kind is not VariableKind.ON_READ
            and self.slot_of is None
            and (self.trainable or bool(self.shape))
        )
        if not may_be_served or not self._home.strategy.placement.is_on_servers(self):
            self.__class__ = DistributedVariable
            return
        constraint = self.constraint
        self.__class__ = ParameterServerVariable
        self.constraint = constraint  # raises if there is one
