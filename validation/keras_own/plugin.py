"""A pytest plugin: each test runs in the scope of one strategy, and outcomes go to a file."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 2)

import stratagem as sg  # noqa: E402 - the devices have to be made first

_NAMES = ["cpu:0", "cpu:1"]
_KEEP_PROGRAMS_S = 60.0
_dropped_s = time.monotonic()


def _tpu() -> sg.Strategy:
    """Chips that CPU devices stand for."""
    with mock.patch.dict(os.environ, STRATAGEM_TPU_PLATFORM="cpu"):
        return sg.TPUStrategy()


_STRATEGIES: dict[str, Callable[[], sg.Strategy]] = {
    "one_device": lambda: sg.OneDeviceStrategy(_NAMES[0]),
    "mirrored": lambda: sg.MirroredStrategy(_NAMES),
    "central": lambda: sg.CentralStorageStrategy(_NAMES),
    "hybrid": lambda: sg.HybridStrategy(_NAMES, placement={"": "sharded"}),
    "tpu": _tpu,
}


def skip_if_backend(given: str, reason: str) -> pytest.MarkDecorator:
    """A name that Keras's tests import from their conftest, which the wheel does not have."""
    return pytest.mark.skipif(given == "jax", reason=reason)


sys.modules["conftest"] = sys.modules[__name__]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the strategy that is the current one, none without it, and the file of outcomes."""
    parser.addoption("--strategy", choices=sorted(_STRATEGIES))
    parser.addoption("--outcomes", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    """Has outcomes written by the process that hears of all of them."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Runs a test, and what it sets up for itself, in the scope."""
    global _dropped_s
    name = item.config.getoption("--strategy")
    with _STRATEGIES[name]().scope() if name else contextlib.nullcontext():
        result = yield
    if time.monotonic() - _dropped_s > _KEEP_PROGRAMS_S:  # JAX keeps all that it has compiled
        jax.clear_caches()
        gc.collect()
        _dropped_s = time.monotonic()
    return result


class Outcomes:
    """The outcome of each test, the worst of its phases and subtests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes one."""
        known = self._outcomes.get(report.nodeid, "passed")
        if report.when == "call" or report.outcome != "passed":
            worst = max(known, report.outcome, key=["passed", "skipped", "failed"].index)
            self._outcomes[report.nodeid] = worst

    def pytest_sessionfinish(self) -> None:
        """Writes them."""
        self._path.write_text(json.dumps(self._outcomes, indent=1), encoding="utf-8")
