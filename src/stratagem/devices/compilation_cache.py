"""JAX's persistent cache of compiled programs, on by default in a private folder of limited size.

The first step of a program that ran before then loads what it would compile. JAX looks programs up
by a digest of the program, the compiler's version and its flags; the folder adds the kind of CPU,
because programs for the CPU use the instructions of the machine that compiled them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path
from typing import Any

import jax

from stratagem import settings
from stratagem.devices.private import write_cache_entries_whole
from stratagem.resources import cache_dir, programs_folder

_logger = logging.getLogger(__name__)

# JAX stores programs that took a second to compile; the step of a small model takes less.
_MIN_COMPILE_TIME_S = 0.1
_JAX_MIN_COMPILE_TIME_S = 1.0


def use_compilation_cache() -> Path | None:
    """Makes JAX store compiled programs, unless the user chose otherwise; returns the folder.

    None if JAX's own settings name a folder or turn its cache off, if
    `STRATAGEM_COMPILATION_CACHE_BYTES` is 0, or if no private folder can be written.
    """
    limit_bytes = settings.read("compilation_cache_bytes")
    folder = programs_folder(cache_dir())
    jax_config: Any = jax.config
    if jax_config.jax_compilation_cache_dir == str(folder):
        return folder  # an earlier strategy
    is_wanted = limit_bytes and jax_config.jax_enable_compilation_cache
    if not is_wanted or jax_config.jax_compilation_cache_dir or not _make_private(folder):
        return None
    if not write_cache_entries_whole():
        return None
    _sweep(folder.parent, limit_bytes)
    jax_config.update("jax_compilation_cache_dir", str(folder))
    if jax_config.jax_persistent_cache_min_compile_time_secs == _JAX_MIN_COMPILE_TIME_S:
        jax_config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_TIME_S)
    return folder


def _make_private(folder: Path) -> bool:
    """Makes the folder if it is missing; returns True if only this user can write to it."""
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _logger.info("Compiled programs are cached in %s.", folder)
        is_private = _is_private(folder)
    except OSError as error:
        _logger.debug("Compiled programs are not cached: %s", error)
        return False
    if not is_private:
        _logger.warning(
            "Compiled programs are not cached, because others can write to %s, and programs in it "
            "are executed. Run `chmod 700 %s`, or set STRATAGEM_COMPILATION_CACHE_BYTES=0.",
            folder,
            folder,
        )
    return is_private


def _is_private(folder: Path) -> bool:
    """Returns True if a folder belongs to this user, and no other can write to it."""
    status = folder.stat()
    is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return is_own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _sweep(root: Path, limit_bytes: int) -> None:
    """Removes the programs that were not read for the longest time until the rest fits."""
    entries: list[tuple[float, int, Path]] = []
    for path in root.rglob("*"):
        with contextlib.suppress(OSError):  # another process removed it
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                last_use_s = max(status.st_atime, status.st_mtime)
                entries.append((last_use_s, status.st_size, path))
    total_bytes = sum(size_bytes for _, size_bytes, _ in entries)
    for _, size_bytes, path in sorted(entries):
        if total_bytes <= limit_bytes:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total_bytes -= size_bytes
