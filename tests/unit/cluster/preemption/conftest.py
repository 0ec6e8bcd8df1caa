"""Fixtures: no scheduler variables, no Google Cloud VM, and restored signal handlers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.cluster.preemption import configuration as google_cloud

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch) -> None:
    """Beside the launchers' variables."""
    for name in ("KUBERNETES_SERVICE_HOST", "STRATAGEM_POD_GRACE_S"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(google_cloud, "_PRODUCT_NAME", Path("/no/such/file"))


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """Fails a test that changes a signal handler permanently."""
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    yield
    after = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert after == before


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Signals received by the test's own handlers, installed before any source."""
    seen: list[int] = []
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    for signum in _SIGNALS:
        signal.signal(signum, lambda signum, _: seen.append(signum))
    yield seen
    for signum, handler in before.items():
        signal.signal(signum, handler)
