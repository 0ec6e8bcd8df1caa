"""What is closed at the end of a `with` block."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Self

__all__ = ["Closing"]


class Closing(abc.ABC):
    """A context manager that closes itself."""

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of what it holds."""
