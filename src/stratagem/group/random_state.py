"""One random state for all processes: that of process 0."""

from __future__ import annotations

import random

import numpy as np

from stratagem.group.current import current_group

__all__ = ["agree_on_random_state"]


def agree_on_random_state() -> None:
    """Gives Python's and NumPy's global generators the state that process 0 has.

    Keras draws seeds of initialisers and the order of shuffled arrays from them. All processes of
    the group have to come here; without a group nothing happens.
    """
    group = current_group()
    if group is None:
        return
    is_first = group.process_id == 0
    own = (random.getstate(), np.random.get_state()) if is_first else None
    told = group.exchange("the random state", own)[0]
    if not is_first:
        random.setstate(told[0])
        np.random.set_state(told[1])
