"""The device that a `keras.device` block names for the variables that are made in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

__all__ = ["explicit_device", "naming_device"]


class _Named(threading.local):
    """What the innermost block of this thread names."""

    device: str | None = None


_named = _Named()


def explicit_device() -> str | None:
    """Returns the device that the innermost block names; None outside of every block."""
    return _named.device


@contextlib.contextmanager
def naming_device(device: str) -> Generator[None]:
    """Names a device in a `with` block.

    Args:
        device: its name, such as "cpu:0".
    """
    _named.device, outer = device, _named.device
    try:
        yield
    finally:
        _named.device = outer
