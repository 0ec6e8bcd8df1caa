"""Temporary folders whose contents survive a restart of the tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator, Mapping

from stratagem.launch.plan.options import LaunchOptions
from stratagem.temporary_folders import TemporaryFolder

# A user who sets one of these has chosen JAX's cache on disk.
_JAX_CACHE_VARIABLES = {"JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"}
# A file system in memory, on Linux, where our folders are private. The variable names another.
_MEMORY, _MEMORY_VARIABLE = "/dev/shm", "STRATAGEM_MEMORY_DIR"  # noqa: S108


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartFolders:
    """Folder for compiled programs, and folder in memory for training state; None for neither."""

    programs: str | None = None
    memory: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that name the folders to tasks."""
        variables: dict[str, str] = {}
        if self.programs is not None:
            variables = {
                # This package makes every process write, where JAX has only process 0 write.
                "STRATAGEM_PROGRAM_DIR": self.programs,
                "JAX_COMPILATION_CACHE_DIR": self.programs,
                # By default only programs that compile for a second; a start has many small ones.
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
        if self.memory is not None:
            variables[_MEMORY_VARIABLE] = self.memory
        return variables


@contextlib.contextmanager
def make_restart_folders(
    options: LaunchOptions, base: Mapping[str, str]
) -> Generator[RestartFolders]:
    """Makes the folders if tasks may restart, and removes them when the launch ends.

    They are outside the run's folder, where files of a killed task would stay forever. Makes none
    that the inherited environment `base` names already. Those of a killed launcher are removed by
    the next one.
    """
    with contextlib.ExitStack() as stack:

        def make(prefix: str, parent: str | None) -> str:
            return str(stack.enter_context(TemporaryFolder(prefix, parent)).path)

        programs = memory = None
        if options.max_restarts:
            if not _JAX_CACHE_VARIABLES & base.keys():
                programs = make("stratagem-programs-", None)
            if _MEMORY_VARIABLE not in base and os.access(_MEMORY, os.W_OK):
                memory = make("stratagem-memory-", _MEMORY)
        yield RestartFolders(programs=programs, memory=memory)
