"""Examples without a download: text of Python's own documentation, digits, and drawn clicks."""

from __future__ import annotations

import ast
import dataclasses
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "CONTEXT",
    "NUM_CHARACTERS",
    "NUM_ITEMS",
    "NUM_USERS",
    "Examples",
    "clicks",
    "digits",
    "documents",
    "text",
]

CONTEXT = 32
NUM_CHARACTERS = 128
NUM_USERS, NUM_ITEMS = 20_000, 50_000
_SEED = 19
# Every n-th document is for validation.
_VALIDATION_EVERY = 10
_SHORTEST = 400
_ZIPF_EXPONENT = 1.1


@dataclasses.dataclass(frozen=True)
class Examples:
    """Inputs and targets, of training and of validation.

    Args:
        x: inputs of training, in the order of training.
        y: their targets.
        validation_x: inputs of validation.
        validation_y: their targets.
    """

    x: np.ndarray[Any, Any]
    y: np.ndarray[Any, Any]
    validation_x: np.ndarray[Any, Any]
    validation_y: np.ndarray[Any, Any]

    def part(self, begin: int, end: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Returns examples of training by place; after the last one comes the first again."""
        places = np.arange(begin, end) % len(self.x)
        return self.x[places], self.y[places]


def documents() -> list[str]:
    """Returns the pages of `help()` and the long docstrings of the standard library, in order."""
    topics = pydoc_data.topics.topics
    found = [topics[name] for name in sorted(topics)]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += _docstrings(path)
    return [one for one in found if len(one) >= _SHORTEST]


def _docstrings(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            words = ast.get_docstring(node)
            if words:
                yield words


def text() -> Examples:
    """Returns windows of the documents' characters, and the same one character later."""
    parts: dict[bool, list[str]] = {False: [], True: []}
    for place, one in enumerate(documents()):
        parts[place % _VALIDATION_EVERY == 0].append(one)
    (x, y), (validation_x, validation_y) = (_windows("\n\n".join(parts[one])) for one in parts)
    order = np.random.default_rng(_SEED).permutation(len(x))
    shown = np.random.default_rng(_SEED).permutation(len(validation_x))[:128]
    return Examples(x[order], y[order], validation_x[shown], validation_y[shown])


def _windows(words: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    codes = np.frombuffer(words.encode("ascii", "ignore"), "uint8").astype("int32")
    num_windows = (len(codes) - 1) // CONTEXT
    first, later = (codes[start : start + num_windows * CONTEXT] for start in (0, 1))
    return first.reshape(num_windows, CONTEXT), later.reshape(num_windows, CONTEXT)


def digits() -> Examples:
    """Returns scikit-learn's images of handwritten digits."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images = (found.images / 16).astype("float32")[..., None]
    labels = found.target.astype("int32")
    order = np.random.default_rng(_SEED).permutation(len(images))
    train, shown = order[:1400], order[1400:]
    return Examples(images[train], labels[train], images[shown], labels[shown])


def clicks(num_examples: int = 200_000) -> Examples:
    """Draws clicks of users on items: ids after Zipf, clicks by a product of hidden vectors."""
    rng = np.random.default_rng(_SEED)
    users, items = (
        _zipf(rng, num_ids, num_examples).astype("int32") for num_ids in (NUM_USERS, NUM_ITEMS)
    )
    user_vectors, item_vectors = (rng.normal(size=(num, 8)) for num in (NUM_USERS, NUM_ITEMS))
    scores = (user_vectors[users] * item_vectors[items]).sum(axis=1)
    clicked = (rng.random(num_examples) < 1 / (1 + np.exp(-scores))).astype("float32")
    x = np.stack([users, items], axis=1)
    return Examples(x[:-4096], clicked[:-4096], x[-4096:], clicked[-4096:])


def _zipf(rng: np.random.Generator, num_ids: int, size: int) -> np.ndarray[Any, Any]:
    weights = 1 / np.arange(1, num_ids + 1) ** _ZIPF_EXPONENT
    ids = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(size))
    return np.minimum(ids, num_ids - 1)
