"""pytest plugin: a record of each test at once, and an end at the time limit that still reports.

Loaded by `python -m validation.gpu.suites`, in the process that schedules and those that run tests.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.platforms import lookups, selected_platform
from validation.gpu.suites.files import needs_several, not_for_a_gpu

UNTIL = "STRATAGEM_TEST_UNTIL_S"
RECORD = "STRATAGEM_TEST_RECORD"
NOT_REACHED = "not reached within the time limit"
NEEDS_SEVERAL = "needs several replicas: the platform gpu runs it on CPU devices"
ALLOCATIONS = "allocations on the GPU"
LOOKUPS = "lookups of the GPU"

# Libraries of some tests that an environment for the GPU need not have.
OPTIONAL = frozenset(
    ("aiohttp", "grain", "keras_hub", "kubernetes_validate", "ray", "tensorflow", "torch")
)
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")


def missing_library(error: str) -> str | None:
    """Returns the optional library whose absence the text of an error names."""
    found = [name for name in _MISSING.findall(error) if name in OPTIONAL]
    return found[-1] if found else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skips a file that imports an optional library which is not installed."""
    report = yield
    library = missing_library(str(report.longrepr)) if report.failed else None
    if library is not None:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {library} is not installed")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what a GPU in the place of the CPU cannot do, with its reason."""
    is_alone = selected_platform().endswith("_alone")
    several = needs_several() if is_alone else frozenset[str]()
    for item in items:
        reason = not_for_a_gpu(item.nodeid)
        if {item.nodeid, item.nodeid.partition("[")[0]} & several:
            reason = NEEDS_SEVERAL
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is left at the time limit."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(NOT_REACHED)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Counts the allocations of a test on the GPU: none tells that it computed elsewhere."""
    before = _num_allocations()
    lookups.clear()
    try:
        yield
    finally:
        after = _num_allocations()
        if before is not None and after is not None:
            item.user_properties.append((ALLOCATIONS, after - before))
        item.user_properties.append((LOOKUPS, dict(lookups)))


def _num_allocations() -> int | None:
    """Returns the allocations of this process on the GPU so far; None without one."""
    jax: Any = sys.modules.get("jax")
    if jax is None or not selected_platform().startswith("gpu"):
        return None
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("num_allocs")


class Record:
    """A line of JSON for each report, written at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, **fields: object) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.write(
                kind="test",
                name=report.nodeid,
                phase=report.when,
                outcome=report.outcome,
                duration_s=round(report.duration, 3),
                started_s=report.start,
                allocations=dict(report.user_properties).get(ALLOCATIONS),
                lookups=dict(report.user_properties).get(LOOKUPS),
                **_reason(report),
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.write(kind="file", name=report.nodeid, outcome=report.outcome, **_reason(report))

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        category = warning_message.category.__name__
        text = f"{category}: {warning_message.message}"
        self.write(kind="warning", name=nodeid, text=text[:500])


def _reason(report: Any) -> dict[str, str]:
    """Returns why a test failed or was skipped, in a line and as a whole."""
    if report.passed or report.longrepr is None:
        return {}
    if isinstance(report.longrepr, tuple):
        return {"reason": str(report.longrepr[2]).removeprefix("Skipped: ")}
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext
    return {"reason": (crash.message if crash else text).strip(), "text": text}


def pytest_configure(config: pytest.Config) -> None:
    """Only the process that schedules writes the record."""
    if RECORD in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(Path(os.environ[RECORD])), "stratagem-record")
