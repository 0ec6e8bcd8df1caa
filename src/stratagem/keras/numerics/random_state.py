"""State of the global random generators: Python, NumPy, PyTorch and Keras."""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
from typing import Any

import numpy as np

from stratagem.keras.json_values import from_json, to_json
from stratagem.keras.private import global_seed_state, set_global_seed_state
from stratagem.messages import explain

__all__ = ["Draws", "RandomState"]

_NAMES = ("keras", "numpy", "python", "torch")


@dataclasses.dataclass(frozen=True)
class Draws:
    """Snapshot of the generators that shuffle data.

    Args:
        python: state of `random`.
        numpy: state of `numpy.random`.
        torch: state of PyTorch as a tensor, or None if PyTorch is not loaded.
    """

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
        """Returns the state in a form that JSON can hold."""
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
        torch, kept = _torch(), from_json(state["torch"])
        return cls(
            python=(version, tuple(words.tolist()), gauss),
            numpy=from_json(state["numpy"]),
            torch=None if torch is None or kept is None else torch.from_numpy(kept),
        )


class RandomState:
    """The global random state for a checkpoint: a restart draws the same numbers as no restart.

    It covers Python's `random`, NumPy, `keras.random` without a seed, and PyTorch if it is loaded.
    Random layers such as dropout have seeds of their own, which the model saves.

    Example:
        >>> import tempfile
        >>> checkpoint = sg.train.Checkpoint(random=sg.train.RandomState())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoint.save(folder + "/ckpt")
        ...     first = np.random.random(3)
        ...     _ = checkpoint.restore(path)
        >>> bool(np.all(np.random.random(3) == first))
        True

    Source: PyTorch Lightning's and Grain's checkpoints save the same state; TF's save none of it.
    """

    def get_state(self) -> dict[str, Any]:
        """Returns the state in a form that JSON can hold."""
        return self.state_with(Draws.now())

    @staticmethod
    def state_with(draws: Draws) -> dict[str, Any]:
        """Returns the state with the given snapshot of the shuffling generators.

        Args:
            draws: the snapshot.
        """
        return {**draws.as_json, "keras": global_seed_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state.

        Args:
            state: result of `get_state`, perhaps from another process.

        Raises:
            ValueError: it is no such state.
        """
        if not isinstance(state, dict) or sorted(state) != list(_NAMES):
            raise ValueError(
                explain(
                    f"RandomState.set_state was given {str(state)[:100]}.",
                    expected="what get_state returned.",
                    fix="save it with sg.train.Checkpoint(random=sg.train.RandomState()).",
                )
            )
        set_global_seed_state(state["keras"])  # first: it may draw from the others
        Draws.from_json(state).set()


def _torch() -> Any:
    """Returns PyTorch if it is already imported, else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "get_rng_state") else None
