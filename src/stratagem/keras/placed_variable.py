"""Keras variables of which some turn out to be for parameter servers."""

from __future__ import annotations

from typing import Any

from stratagem.keras.served_variable import ServedVariable
from stratagem.keras.variable import DistributedVariable
from stratagem.variables import Home, VariableKind

__all__ = ["PlacedVariable"]


class PlacedVariable(DistributedVariable):
    """A Keras variable that is not placed yet: the rules want to know its path and shape.

    Made by `keras.Variable` itself; takes its arguments. It becomes a `ServedVariable`, or a
    `DistributedVariable`, when it gets its initial value; its class changes.
    """

    def _initialize_with_initializer(self, initializer: Any) -> None:
        self._become_what_the_rules_say()
        self._initialize_with_initializer(initializer)

    def settle(self, home: Home, value: Any) -> None:
        """Makes a variable that became one of a strategy keep its value where the rules say."""
        self._home = home
        self._become_what_the_rules_say()
        self.settle(home, value)

    def _become_what_the_rules_say(self) -> None:
        # A counter or a learning rate is this process's: servers are told of it.
        may_be_served = (
            self._home.kind is not VariableKind.ON_READ
            and self.slot_of is None
            and (self.trainable or bool(self.shape))
        )
        if not may_be_served or not self._home.strategy.placement.is_on_servers(self):
            self.__class__ = DistributedVariable
            return
        constraint = self.constraint
        self.__class__ = ServedVariable
        self.constraint = constraint  # which raises, if there is one
