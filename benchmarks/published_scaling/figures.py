"""The published figures, as read from `figures.toml`."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

__all__ = ["Group", "PublishedRow", "read_groups"]

_FILE = Path(__file__).with_name("figures.toml")


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """One published throughput; the fields are described in `figures.toml`."""

    devices: int
    batch: int
    throughput: float
    passes: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Published throughputs that differ in nothing but the number of devices and the batch."""

    title: str
    year: int
    model: str
    program: str
    hardware: str
    accelerator: str
    devices_per_host: int
    network_gbit_per_s: float
    precision: str
    unit: str
    state: str
    overlap: str
    source: str
    rows: tuple[PublishedRow, ...]
    unit_count: int = 1
    message_bytes: int = 0
    missing: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """True if the publication states all that a prediction needs."""
        return not self.missing

    @property
    def smallest(self) -> PublishedRow:
        """The row that the others are compared with."""
        return self.rows[0]


def read_groups(path: Path = _FILE) -> list[Group]:
    """Returns the groups of a file, each with its rows by number of devices."""
    return [_group(fields) for fields in tomllib.loads(path.read_text())["group"]]


def _group(fields: dict[str, Any]) -> Group:
    rows = sorted((PublishedRow(**row) for row in fields["rows"]), key=lambda row: row.devices)
    missing = tuple(fields.get("missing", ()))
    found: dict[str, Any] = fields | {"rows": tuple(rows), "missing": missing}
    return Group(**found)
