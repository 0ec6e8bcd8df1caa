"""Changes of a keyed table: marked slots, and keys in a journal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from stratagem.parameter_server.server.tables.key_slots import SavedKeys


@dataclasses.dataclass(frozen=True)
class KeyedMarks:
    """Changed slots of a keyed shard: of its rows, and of the keys that have no row yet."""

    rows: np.ndarray
    candidates: np.ndarray


@dataclasses.dataclass(frozen=True)
class SavedTable:
    """Keys of rows in a journal.

    Args:
        rows: slots of the rows.
        candidates: slots of the keys that have no row yet.
        counters: counters of the table.
        initials: initial values of the optimizer slots, by name.
        disk: rows on disk that belong to the journal; None without tiers.
    """

    rows: SavedKeys
    candidates: SavedKeys
    counters: Mapping[str, int]
    initials: Mapping[str, float]
    disk: Mapping[str, Any] | None = None
