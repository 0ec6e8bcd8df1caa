"""Tables that are measured, and the sides that have them."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.cases import Side, whole_side
from benchmarks.workers.table_work import TableOptions

__all__ = ["COMPARISONS", "NUM_IDS", "Comparison", "by_options"]

NUM_IDS = (1_000, 10_000, 100_000)
_SMALLEST_ROWS, _SMALLEST_IDS = 20_000, 1_000

_QUIET = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
_OURS = whole_side("Stratagem", "stratagem_tables")
_TORCHREC = whole_side("TorchRec", "torchrec_tables", environment="peers")
_TENSORFLOW = dataclasses.replace(
    whole_side("TensorFlow", "tensorflow_tables", environment="peers"), variables=_QUIET
)
_ADDONS = dataclasses.replace(
    whole_side("recommenders-addons", "tensorflow_tables", environment="tfra"), variables=_QUIET
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Ours beside one peer, with the same table. Both are started together, and take turns.

    Args:
        name: of the table.
        options: of the table.
        peer: the other side.
        is_large: whether it is measured only when it is asked for by its name.
    """

    name: str
    options: TableOptions
    peer: Side
    is_large: bool = False

    @property
    def sides(self) -> tuple[Side, Side]:
        """Ours and the peer."""
        return _OURS, self.peer

    @property
    def title(self) -> str:
        """Name of the table and of the peer."""
        return f"{self.name}, {self.peer.name}"

    def smallest(self) -> Comparison:
        """Returns the same with a small table."""
        options = dataclasses.replace(self.options, num_rows=_SMALLEST_ROWS, row_size=16)
        return dataclasses.replace(self, options=options)

    def num_ids(self, *, is_smallest: bool) -> tuple[int, ...]:
        """Returns the numbers of ids in a call."""
        return (_SMALLEST_IDS,) if is_smallest else NUM_IDS

    def arguments(self) -> dict[str, Any]:
        """Returns the options of a worker."""
        return dataclasses.asdict(self.options)


def _compared(
    name: str, num_rows: int, row_size: int, *, is_large: bool = False
) -> list[Comparison]:
    rows = TableOptions(num_rows, row_size)
    keyed = dataclasses.replace(rows, is_keyed=True)
    return [
        Comparison(f"{name} rows", rows, _TORCHREC, is_large),
        Comparison(f"{name} rows", rows, _TENSORFLOW, is_large),
        Comparison(f"{name} keys", keyed, _ADDONS, is_large),
    ]


COMPARISONS = (
    *_compared("1 M x 64", 10**6, 64),
    Comparison("1 M x 64 rows, one process", TableOptions(10**6, 64, num_holders=1), _TORCHREC),
    *_compared("10 M x 16", 10**7, 16, is_large=True),
    # Two tables at once need 20 GB with rows of 4, and 40 with rows of 16.
    *_compared("100 M x 4", 10**8, 4, is_large=True),
)


def by_options(only: str, *, is_smallest: bool) -> list[Comparison]:
    """Returns what is measured: large tables where `only` names them."""
    chosen = [one for one in COMPARISONS if only in one.title and (only or not one.is_large)]
    return [one.smallest() for one in chosen] if is_smallest else chosen
