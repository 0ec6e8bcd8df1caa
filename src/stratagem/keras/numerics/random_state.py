"""Random numbers: seeds that differ between replicas, and the state of the global generators."""

from __future__ import annotations

import base64
import dataclasses
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.errors import invalid
from stratagem.execution.replica_context import get_replica_context
from stratagem.keras.patches import patches
from stratagem.keras.private import global_seed_state, set_global_seed_state
from stratagem.keras.variables.requests import IS_SEED, annotated

# Seeds that differ between replicas and depend only on the initial seed: in a replica function the
# replica id is mixed into each. Replica 0 draws the numbers of one device.

# 2**32 divided by the golden ratio: small multiples are far apart, so replicas never get the seeds
# of later steps.
_SEED_STRIDE = 0x9E3779B9


@patches(
    keras.random.SeedGenerator,
    "next",
    why="replicas draw different numbers, which follow from one seed",
)
def replica_seed(original: Callable[..., Any]) -> Any:
    """Returns `SeedGenerator.next` whose seeds differ by replica."""

    def next_seed(self: keras.random.SeedGenerator, ordered: bool = True) -> Any:
        seed = original(self, ordered)
        context = get_replica_context()
        if context is None:
            return seed
        first = context.strategy.topology.first_replica_id
        if context.num_replicas_in_sync == 1 and not first:
            return seed
        replica_id = jnp.asarray(context.replica_id_in_sync_group, jnp.uint32) + jnp.uint32(first)
        offset = (replica_id * jnp.uint32(_SEED_STRIDE)).astype(seed.dtype)
        return seed.at[0].add(offset)

    return next_seed


@patches(
    keras.random.SeedGenerator,
    "__init__",
    why="the seed of a worker is not stored on parameter servers",
)
def worker_local(original: Callable[..., Any]) -> Any:
    """Returns `SeedGenerator.__init__` whose state stays in each worker."""

    @functools.wraps(original)
    def init(self: keras.random.SeedGenerator, *args: object, **kwargs: object) -> None:
        with annotated(is_worker_local=True):
            original(self, *args, **kwargs)
        setattr(self.state, IS_SEED, True)  # if it joins a strategy later

    return init


# State of the global random generators: Python, NumPy, PyTorch and Keras.

_NAMES = ("keras", "numpy", "python", "torch")


@dataclasses.dataclass(frozen=True)
class Draws:
    """Snapshot of the generators that shuffle data. `torch` is a tensor; None if not loaded."""

    python: Any
    numpy: Any
    torch: Any

    @classmethod
    def now(cls) -> Draws:
        """Returns the current state."""
        torch = _torch()
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(legacy=False),
            torch=None if torch is None else torch.get_rng_state(),
        )

    def set(self) -> None:
        """Restores this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch = _torch()
        if torch is not None and self.torch is not None:
            torch.set_rng_state(self.torch)

    @functools.cached_property
    def as_json(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        version, words, gauss = self.python
        return {
            "python": to_json([version, np.asarray(words, np.uint32), gauss]),
            "numpy": to_json(self.numpy),
            "torch": None if self.torch is None else to_json(self.torch.numpy()),
        }

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Draws:
        """Returns the snapshot of an `as_json` result."""
        version, words, gauss = from_json(state["python"])
        torch, generator = _torch(), from_json(state["torch"])
        return cls(
            python=(version, tuple(words.tolist()), gauss),
            numpy=from_json(state["numpy"]),
            torch=None if torch is None or generator is None else torch.from_numpy(generator),
        )


class RandomState:
    """Global random state for a checkpoint: a restarted run draws the same numbers.

    Covers Python's `random`, NumPy, `keras.random` without a seed, and PyTorch if loaded. Random
    layers such as dropout have their own seeds, which the model saves.

    Example:
        >>> import tempfile
        >>> checkpoint = sg.train.Checkpoint(random=sg.train.RandomState())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoint.save(folder + "/ckpt")
        ...     first = np.random.random(3)
        ...     _ = checkpoint.restore(path)
        >>> bool(np.all(np.random.random(3) == first))
        True

    Source: PyTorch Lightning's and Grain's checkpoints save the same state; TF's do not.
    """

    def get_state(self) -> dict[str, Any]:
        """Returns the state as a dict that JSON can store."""
        return self.state_with(Draws.now())

    @staticmethod
    def state_with(draws: Draws) -> dict[str, Any]:
        """Returns the state with the given snapshot of the shuffling generators."""
        return {**draws.as_json, "keras": global_seed_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state.

        Args:
            state: result of `get_state`, possibly from another process.

        Raises:
            ValueError: `state` is not a result of `get_state`.
        """
        if not isinstance(state, dict) or sorted(state) != list(_NAMES):
            raise invalid(
                f"RandomState.set_state received {str(state)[:100]}.",
                expected="the result of RandomState.get_state.",
                fix="save the state with sg.train.Checkpoint(random=sg.train.RandomState()).",
            )
        set_global_seed_state(state["keras"])  # First, because it may draw from the others.
        Draws.from_json(state).set()


def _torch() -> Any:
    """Returns PyTorch if it is already imported, else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "get_rng_state") else None


# Values as JSON can hold them: arrays as text, numbers of NumPy as Python's.


_ARRAY = "array in base64"


def to_json(value: object) -> Any:
    """Returns a value as lists, dicts, texts and numbers; tuples become lists.

    Args:
        value: of these and of arrays.
    """
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | jax.Array):
        array = np.ascontiguousarray(value)
        text = base64.b64encode(array.tobytes()).decode()
        return {_ARRAY: text, "dtype": str(array.dtype), "shape": list(np.shape(value))}
    return value


def from_json(value: object) -> Any:
    """Returns what `to_json` was given, with lists for tuples.

    Args:
        value: what it returned.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        raw = np.frombuffer(base64.b64decode(value[_ARRAY]), np.dtype(value["dtype"]))
        return raw.reshape(value["shape"]).copy()
    return {key: from_json(item) for key, item in value.items()}
