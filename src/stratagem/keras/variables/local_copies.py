"""Local copies: the weights of each replica, where replicas train apart for some steps."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any


class LocalCopies:
    """The part of a variable that knows its local copy; the variable itself is the global model."""

    local_copy: Any = None
    # Variables that the next synchronization needs, by name.
    outer_state: Mapping[str, Any] = types.MappingProxyType({})

    fragment_sends: Any = None  # of the variables that an optimizer trains, if this is the first

    def keep_local_copy(self, copy: Any, outer_state: Mapping[str, Any]) -> None:
        """Makes replicas read and assign a copy of this variable in their training steps."""
        self.local_copy, self.outer_state = copy, outer_state
