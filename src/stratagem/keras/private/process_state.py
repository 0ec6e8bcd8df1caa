"""Private state of Keras in a process: automatic names and the default seed."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import global_seed_generator

if TYPE_CHECKING:
    pass


_NAME_COUNTS = "object_name_uids"


@contextlib.contextmanager
def fresh_names() -> Generator[None]:
    """Restarts automatic names of layers and other objects; restores the counters afterwards."""
    before = global_state.get_global_attribute(_NAME_COUNTS)
    global_state.set_global_attribute(_NAME_COUNTS, defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAME_COUNTS, before)


_MASKS = "_keras_mask_dict"


@contextlib.contextmanager
def fresh_masks() -> Generator[None]:
    """Forgets the masks of tracers of earlier traces; restores those of other tensors afterwards.

    Keras finds a tracer's mask by its `id`, and drops it in the thread that collects the tracer. In
    another thread than its own, it stays, for the next tracer with that id.
    """
    before = global_state.get_global_attribute(_MASKS)
    global_state.set_global_attribute(_MASKS, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(_MASKS, before)


_GLOBAL_SEED_GENERATOR = "global_seed_generator"


def global_seed_state() -> list[int] | None:
    """Returns the default seed of `keras.random`, or None before its first use."""
    generator = global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)
    return None if generator is None else np.asarray(generator.state.value).tolist()


def set_global_seed_state(state: list[int] | None) -> None:
    """Sets the default seed of `keras.random` to a result of `global_seed_state`."""
    if state is None:
        global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, None)
    else:
        generator = global_seed_generator()
        generator.state.assign(np.asarray(state, generator.state.dtype))
