"""Device named by the innermost `keras.device` block, for variables created in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator


class _NamedDevice(threading.local):
    """The device named by the innermost block of this thread."""

    device: str | None = None


_named_device = _NamedDevice()


def explicit_device() -> str | None:
    """Returns the device named by the innermost block, or None."""
    return _named_device.device


@contextlib.contextmanager
def naming_device(device: str) -> Generator[None]:
    """Names a device, such as "cpu:0", within a `with` block."""
    _named_device.device, outer = device, _named_device.device
    try:
        yield
    finally:
        _named_device.device = outer
