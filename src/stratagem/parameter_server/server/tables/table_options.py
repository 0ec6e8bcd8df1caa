"""Options of a keyed table, as a client sends them in `ShardSpec.table`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from stratagem.messages import explain
from stratagem.parameter_server.server.tables.policies import Admission, Eviction, policy_from
from stratagem.parameter_server.server.tables.row_formats import ROW_DTYPES
from stratagem.parameter_server.server.tables.row_initializer import RowInitializer


@dataclasses.dataclass(frozen=True)
class TierOptions:
    """Memory for the rows of a table on each server, and the folder of the others.

    Args:
        memory_bytes: memory of rows and their optimizer slots on a server, in bytes. Keys are
            always in memory, and are not part of it: about 40 bytes for each row.
        folder: folder on the server's disk, which several tables and servers may share.

    Raises:
        ValueError: a size below 1, or no folder.

    Example:
        >>> sg.embedding.TierOptions(memory_bytes=2**30, folder="/disk/tables").memory_bytes
        1073741824

    Source: specific to Stratagem; PERSIA and HugeCTR's hierarchical parameter server have tiers.
    """

    memory_bytes: int
    folder: str

    def __post_init__(self) -> None:
        if self.memory_bytes < 1 or not self.folder:
            raise ValueError(
                explain(
                    f"A keyed table has the tiers {dataclasses.asdict(self)}.",
                    expected="memory_bytes of at least 1, and a folder.",
                    fix="omit tiers to keep all rows in memory.",
                )
            )


@dataclasses.dataclass(frozen=True)
class TableOptions:
    """Initial rows, policies and size limit of the keyed rows of one server.

    Args:
        initializer: initial rows.
        admission: decides which keys get a row; None for all.
        eviction: decides which rows are evicted; None for none.
        max_rows: most rows of this server; None for as many as fit in memory. A full table without
            `LeastFrequent` and `LeastRecent` refuses more keys.
        allow_row_export: True if keys may be exported with their rows.
        tiers: memory limit beyond which rows are on disk; None for all in memory.
        storage_dtype: dtype in which rows are held, see `RowFormat`; None for that of the table.

    Raises:
        ValueError: a limit below 1, or another dtype.
    """

    initializer: RowInitializer
    admission: Admission | None = None
    eviction: Eviction | None = None
    max_rows: int | None = None
    allow_row_export: bool = False
    tiers: TierOptions | None = None
    storage_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.storage_dtype not in (None, *ROW_DTYPES):
            raise ValueError(
                explain(
                    f"A keyed table has storage_dtype={self.storage_dtype!r}.",
                    expected=f"one of {ROW_DTYPES}, or None.",
                    fix="omit storage_dtype to hold rows as they are computed with.",
                )
            )
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(
                explain(
                    f"A keyed table has max_rows={self.max_rows}.",
                    expected="at least 1 row.",
                    fix="omit max_rows for no limit.",
                )
            )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> TableOptions:
        """Returns the options from JSON fields.

        Raises:
            ValueError: an unknown option, or an invalid one.
        """
        unknown = {name for name, value in fields.items() if value is not None} - {
            one.name for one in dataclasses.fields(cls)
        }
        if unknown:
            raise ValueError(
                explain(
                    f"A keyed table has the options {sorted(unknown)}, which servers do not have.",
                    expected=f"some of {[one.name for one in dataclasses.fields(cls)]}.",
                    fix="run the same Stratagem version in all processes.",
                )
            )
        tiers = fields.get("tiers")
        return cls(
            RowInitializer.from_fields(fields.get("initializer") or {}),
            policy_from(fields.get("admission")),
            policy_from(fields.get("eviction")),
            fields.get("max_rows"),
            bool(fields.get("allow_row_export")),
            None if tiers is None else tier_options(tiers),
            fields.get("storage_dtype"),
        )


def tier_options(fields: Mapping[str, Any]) -> TierOptions:
    """Returns tiers from JSON fields; raises ValueError for missing or unknown ones."""
    if {*fields} != {one.name for one in dataclasses.fields(TierOptions)}:
        raise ValueError(
            explain(
                f"A keyed table has the tiers {dict(fields)}.",
                expected="memory_bytes and folder.",
                fix="run the same Stratagem version in all processes.",
            )
        )
    return TierOptions(**fields)
