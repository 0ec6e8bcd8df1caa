"""Tables on servers in a series of checkpoints: most of these have only the rows that changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol


class RemoteTables(Protocol):
    """Tables of a group of servers, by name. Equal for all tables of the group."""

    def save_to(self, folder: Path, names: Iterable[str]) -> int:
        """Writes all rows of tables to a new folder, and returns the number of the version: 1."""
        ...

    def save_next(
        self, folder: Path, names: Iterable[str], checkpoint: str, last: str | None, full_every: int
    ) -> int:
        """Writes what changed since the checkpoint `last`, or all rows, as a new version."""
        ...

    def remove_from(self, folder: Path, number: int) -> None:
        """Removes the version of a checkpoint that was not written."""
        ...

    def keep_for(self, folder: Path, checkpoints: Collection[str]) -> None:
        """Removes the versions that none of these checkpoints needs."""
        ...

    def check_in(self, folder: Path, names: Mapping[str, str], number: int) -> None:
        """Verifies what `restore_from` reads; raises DataLossError, or ValueError for others."""
        ...

    def restore_from(self, folder: Path, names: Mapping[str, str], number: int) -> None:
        """Replaces the rows of tables; `names` maps them to the names when they were saved."""
        ...


class TableSeries:
    """Rows of the checkpoints of a manager, in a folder beside these.

    A checkpoint names the version of its rows. A version is complete before the checkpoint is, and
    is removed after it, so that a killed process leaves no checkpoint without its rows.

    Args:
        folder: folder of the versions.
        full_every: at most so many checkpoints in a row have all rows once.
    """

    def __init__(self, folder: Path, full_every: int) -> None:
        self.folder = folder
        self.last: str | None = None  # name of the checkpoint that the next one continues
        self._full_every = full_every
        self._groups: list[RemoteTables] = []

    def save(self, groups: Mapping[RemoteTables, Iterable[str]], checkpoint: str) -> list[int]:
        """Writes the tables of each group, and returns the numbers of the versions.

        Raises:
            OSError: a file cannot be written. Then none of the versions is left.
        """
        numbers: list[int] = []
        self._groups = list(groups)
        try:
            for place, (tables, names) in enumerate(groups.items()):
                numbers.append(
                    tables.save_next(
                        self._folder_of(place),
                        sorted(names),
                        checkpoint,
                        self.last,
                        self._full_every,
                    )
                )
        except BaseException:
            self.remove(numbers)
            raise
        return numbers

    def remove(self, numbers: Collection[int]) -> None:
        """Removes the versions of a checkpoint that was not written."""
        for place, number in enumerate(numbers):
            self._groups[place].remove_from(self._folder_of(place), number)

    def keep_for(self, checkpoints: Collection[str]) -> None:
        """Removes the versions that none of these checkpoints needs."""
        for place, tables in enumerate(self._groups):
            tables.keep_for(self._folder_of(place), checkpoints)

    def _folder_of(self, place: int) -> Path:
        return self.folder / str(place)
