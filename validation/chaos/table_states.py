"""Numbered updates of keyed tables, and the rows of saved versions as sets of these updates.

Each update of a row adds a digit of its own: an update is found in the row's value, however often
it was made. All numbers are whole and below 2**24, so a float32 has them exactly.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from stratagem.parameter_server.server.tables.row_formats import BUCKET_COUNT, buckets_of
from stratagem.parameter_server.server.tables.saved_tables import TableVersions
from stratagem.parameter_server.server.tables.table_chains import TableChain

__all__ = ["KEYS", "TABLES", "WIDTH", "PartState", "Plan", "Snapshot", "read_snapshot"]

TABLES = ("recent", "aged", "tiered")
WIDTH = 64
_BASE, _DIGITS = 16, 6
_NUM_KEYS, _KEYS_OF_UPDATE = 120, 6
# Frequent keys become rare, and are evicted: the order of the keys moves on.
_UPDATES_BETWEEN_MOVES = 12
KEYS = (np.arange(1, _NUM_KEYS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


class Plan:
    """Keys of each update, and the place of the update among those of the key."""

    def __init__(self, seed: int, num_updates: int) -> None:
        rng = np.random.default_rng(seed)
        odds = 1 / np.arange(1, _NUM_KEYS + 1) ** 1.1
        # By table and key, the numbers of its updates.
        self.numbers: dict[tuple[str, int], list[int]] = {}
        self._keys: list[dict[str, np.ndarray]] = []
        self._places: list[dict[str, np.ndarray]] = []
        for number in range(num_updates):
            keys: dict[str, np.ndarray] = {}
            places: dict[str, np.ndarray] = {}
            for table in TABLES:
                ranks = rng.choice(_NUM_KEYS, _KEYS_OF_UPDATE, replace=False, p=odds / odds.sum())
                own = (ranks + number // _UPDATES_BETWEEN_MOVES) % _NUM_KEYS
                lists = [self.numbers.setdefault((table, int(KEYS[key])), []) for key in own]
                keys[table], places[table] = KEYS[own], np.array([len(one) for one in lists])
                for one in lists:
                    one.append(number)
            self._keys.append(keys)
            self._places.append(places)
        assert max(map(len, self.numbers.values())) <= WIDTH * _DIGITS

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self, number: int, table: str) -> np.ndarray:
        """Returns the keys of an update."""
        return self._keys[number][table]

    def keys_on(self, number: int, table: str, server: int) -> np.ndarray:
        """Returns the keys of an update whose rows are on one of two servers."""
        keys = self._keys[number][table]
        return keys[(buckets_of(keys) >= BUCKET_COUNT // 2) == bool(server)]

    def gradient(self, number: int, table: str) -> np.ndarray:
        """Returns what an update adds to the rows of its keys."""
        places = self._places[number][table]
        rows = np.zeros((len(places), WIDTH), np.float32)
        rows[np.arange(len(places)), places // _DIGITS] = float(_BASE) ** (places % _DIGITS)
        return rows

    def made(self, table: str, key: int, row: np.ndarray) -> dict[int, int]:
        """Returns how often each update was made to a row; -1 for what no update adds."""
        numbers = self.numbers.get((table, key), [])
        made: dict[int, int] = {}
        for column in np.flatnonzero(row).tolist():
            value = int(row[column])
            if value != row[column] or not 0 < value < _BASE**_DIGITS:
                made[-1] = 1
                continue
            for digit in range(_DIGITS):
                times = value // _BASE**digit % _BASE
                place = column * _DIGITS + digit
                if times:
                    made[numbers[place] if place < len(numbers) else -1] = times
        return made


@dataclasses.dataclass(frozen=True)
class PartState:
    """Rows of a table on one server, as a version has them.

    `version` counts the updates of the server. `rows` has, for each key, the updates in its value
    with how often each was made, and the count of the row.
    """

    table: str
    server: int
    version: int
    counters: Mapping[str, int]
    rows: Mapping[int, tuple[Mapping[int, int], int]]
    candidates: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A version, and the times before and after the save that reported it."""

    number: int
    begun_s: float
    ended_s: float
    parts: tuple[PartState, ...]

    @property
    def digest(self) -> str:
        """A checksum of all rows, counts and counters."""
        return hashlib.sha256(self.to_json(0, 0).encode()).hexdigest()[:16]

    def to_json(self, begun_s: float | None = None, ended_s: float | None = None) -> str:
        """Returns all of it as text."""
        parts = [
            {
                **dataclasses.asdict(one),
                "rows": [
                    [key, sorted(made.items()), count]
                    for key, (made, count) in sorted(one.rows.items())
                ],
                "candidates": sorted(one.candidates.items()),
            }
            for one in self.parts
        ]
        times = {
            "begun_s": self.begun_s if begun_s is None else begun_s,
            "ended_s": self.ended_s if ended_s is None else ended_s,
        }
        return json.dumps({"number": self.number, **times, "parts": parts})

    @staticmethod
    def from_json(text: str) -> Snapshot:
        """Reads the text of `to_json`."""
        fields = json.loads(text)
        parts = tuple(
            PartState(
                **{
                    **one,
                    "rows": {key: (dict(made), count) for key, made, count in one["rows"]},
                    "candidates": dict(one["candidates"]),
                }
            )
            for one in fields.pop("parts")
        )
        return Snapshot(**fields, parts=parts)


def read_snapshot(
    folder: Path, number: int, plan: Plan, begun_s: float = 0.0, ended_s: float = 0.0
) -> Snapshot:
    """Reads a version from its files; raises DataLossError if one is damaged."""
    versions = TableVersions(folder)
    parts: list[PartState] = []
    for name, table in versions.manifest(number)["tables"].items():
        (kind,) = (one for one in TABLES if one in name)
        for part in range(len(table["parts"])):
            described = versions.chain(number, name, part)
            with TableChain(versions.folder, described) as chain:
                parts.append(_part(chain, kind, part, plan))
    return Snapshot(number, begun_s, ended_s, tuple(parts))


def _part(chain: TableChain, table: str, server: int, plan: Plan) -> PartState:
    rows: dict[int, tuple[Mapping[int, int], int]] = {}
    candidates: dict[int, int] = {}
    for _, part in chain.rows():
        keys, counts = part.rows.keys.tolist(), part.rows.counts.tolist()
        buckets = buckets_of(part.rows.keys).tolist()
        for key, count, bucket, row in zip(keys, counts, buckets, part.value, strict=True):
            made = plan.made(table, key, row)
            if key in rows or bucket not in chain.buckets:
                made[-1] = 1
            rows[key] = made, count
        own = part.candidates
        candidates |= dict(zip(own.keys.tolist(), own.counts.tolist(), strict=True))
    counters = dict(chain.end.counters)
    return PartState(table, server, chain.end.version, counters, rows, candidates)
