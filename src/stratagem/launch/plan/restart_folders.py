"""Folders in which tasks keep something for their next start; they go with the launch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Generator, Mapping

from stratagem.launch.plan.options import LaunchOptions

__all__ = ["KeptFolders", "kept_folders"]

# Whoever sets one of them has made up his mind about JAX's cache on disk.
_JAX_CACHE_VARIABLES = {"JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"}
# A file system in memory, on Linux; whoever names another folder wants that one.
_MEMORY, _MEMORY_VARIABLE = "/dev/shm", "STRATAGEM_MEMORY_DIR"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptFolders:
    """What the tasks of one start leave to those of the next.

    Args:
        programs: where they keep compiled programs; None if they do not.
        memory: in memory, where they keep their state; None if they do not.
    """

    programs: str | None = None
    memory: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """What tells the tasks of them."""
        variables: dict[str, str] = {}
        if self.programs is not None:
            variables = {
                # That process 0 is not the only one to write is this library's doing.
                "STRATAGEM_PROGRAM_DIR": self.programs,
                "JAX_COMPILATION_CACHE_DIR": self.programs,
                # By default only what has taken a second: a start compiles many small programs.
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
        if self.memory is not None:
            variables[_MEMORY_VARIABLE] = self.memory
        return variables


@contextlib.contextmanager
def kept_folders(options: LaunchOptions, base: Mapping[str, str]) -> Generator[KeptFolders]:
    """Makes the folders where tasks may be started again, and removes them at the end.

    Not in the folder of the run: what a killed task has half written stays there for ever.

    Args:
        options: of the launch.
        base: the variables that tasks inherit; what they name already is left to them.

    Yields:
        The folders.
    """
    with contextlib.ExitStack() as stack:

        def made(parent: str | None) -> str:
            folder = tempfile.TemporaryDirectory(
                prefix="stratagem-", dir=parent, ignore_cleanup_errors=True
            )
            return stack.enter_context(folder)

        programs = memory = None
        if options.max_restarts:
            if not _JAX_CACHE_VARIABLES & base.keys():
                programs = made(None)
            if _MEMORY_VARIABLE not in base and os.access(_MEMORY, os.W_OK):
                memory = made(_MEMORY)
        yield KeptFolders(programs=programs, memory=memory)
