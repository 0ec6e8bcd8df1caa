"""Synchronization of Python's and NumPy's global random state across processes."""

from __future__ import annotations

import random

import numpy as np

from stratagem.group.current import current_group


def agree_on_random_state() -> None:
    """Copies process 0's state of Python's and NumPy's global generators to the group.

    Keras draws seeds of initializers and the order of shuffled arrays from them.
    """
    group = current_group()
    if group is None:
        return
    is_first = group.process_id == 0
    own = (random.getstate(), np.random.get_state()) if is_first else None
    state = group.exchange("the random state", own)[0]
    # A process that joins an elastic group later has only its own values until then.
    if not is_first and state is not None:
        random.setstate(state[0])
        np.random.set_state(state[1])
