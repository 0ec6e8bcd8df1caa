"""What every test finds: 8 virtual CPU devices, Keras on JAX, strict types; and what it must leave.

With `STRATAGEM_TEST_PLATFORM=gpu` there is a GPU beside them (`validation/gpu/suites`).

The settings stand above the imports because JAX and Keras read them once, when they are loaded or
when the backend starts.
"""

from __future__ import annotations

import ctypes
import gc
import os

from tests.platforms import jax_environment, selected_platform, set_up_devices

os.environ.update(jax_environment(os.environ))
os.environ["KERAS_BACKEND"] = "jax"
# The size of XLA:CPU's thread pool: with fewer than about four threads a device, collectives
# between virtual devices can wait for each other for ever (JAX up to 0.11.2).
os.environ["NPROC"] = "32"

import itertools
import random
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import keras  # noqa: F401 - sets environment variables of its own, once, before any test
import numpy as np
import pytest

import stratagem
from stratagem.cluster import addresses
from tests.process_state import ProcessState

# Background jobs of a shell and of nohup ignore some signals, and so would what a test starts.
for _signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        _is_interrupt = _signum == signal.SIGINT
        signal.signal(_signum, signal.default_int_handler if _is_interrupt else signal.SIG_DFL)

# What the tests cache serves tests, and nobody else.
_cache_dir = tempfile.TemporaryDirectory(prefix="stratagem-tests-")
os.environ.setdefault("STRATAGEM_CACHE_DIR", _cache_dir.name)

# A process of a cluster (tests/multiprocess) has fewer.
_PLATFORM = selected_platform()
set_up_devices(_PLATFORM, int(os.environ.get("STRATAGEM_TEST_DEVICES", "8")))
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The duration of an example, and of drawing it, depends on what else the machine does. The same
# examples are drawn each time, so that a change fails for what it changes, and nobody for what was
# there before; NEW_EXAMPLES=1 draws new ones.
hypothesis.settings.register_profile(
    "ours",
    deadline=None,
    derandomize="NEW_EXAMPLES" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ours")

if "STRATAGEM_TEST_REPLICAS" in os.environ:  # what joining a cluster changes belongs to the process
    stratagem.MultiWorkerMirroredStrategy()

# Relative tolerance of one operation's result. A GPU multiplies float32 matrices in TF32.
_RELATIVE_TOLERANCE = {
    "cpu": {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2},
    "gpu": {"float64": 1e-10, "float32": 2e-3, "float16": 5e-3, "bfloat16": 2e-2},
}


def pytest_configure(config: pytest.Config) -> None:
    """Ignores four warnings that are expected here.

    JAX 0.12 warns about plain Keras, and rows of a test compile a step each.
    """
    ignored = "ignore:Explicitly requested dtype .* requested in ShapeDtypeStruct:UserWarning"
    config.addinivalue_line("filterwarnings", ignored)
    ignored = "ignore:.*was compiled 3 times for arguments of the same kinds:RuntimeWarning"
    config.addinivalue_line("filterwarnings", ignored)
    if _PLATFORM != "cpu":  # what JAX says of a GPU tells of no error of ours
        config.addinivalue_line("filterwarnings", "default:::jax")
    # Keras's variables take part in NumPy's conversion by an older protocol, as when it saves them.
    ignored = "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    config.addinivalue_line("filterwarnings", ignored)
    # Another process may be writing the program that is read; JAX then compiles it.
    ignored = "ignore:Error (reading|writing) persistent compilation cache:UserWarning"
    config.addinivalue_line("filterwarnings", ignored)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files without a compatibility test if only those run: loading all takes a minute."""
    is_test = collection_path.match("test_*.py")
    if not is_test or not config.option.markexpr.startswith("compatibility"):
        return None
    return None if "mark.compatibility" in collection_path.read_text(encoding="utf-8") else True


_READ_BY_PROGRAMS = ("JAX_", "XLA_", "KERAS_", "STRATAGEM_", "TF_CONFIG")


def _require_unchanged(before: dict[str, str]) -> None:
    """A module that sets a variable when it is imported would set it for all processes of tests."""
    changed = {name for name, _ in before.items() ^ os.environ.items()}
    if changed := sorted(name for name in changed if name.startswith(_READ_BY_PROGRAMS)):
        raise pytest.UsageError(f"Modules of tests set {changed} when they are imported.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Gives each test the same random numbers, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)


class _PortsInTurn:
    """In place of the random choice of free ports: those that no other process of the run takes.

    Some are bound a while after they were found free, such as by the tasks of a launch.
    """

    def __init__(self) -> None:
        count = 1_500
        first = count * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8)
        begin = os.getpid() * 7 % count  # those of the run before may not be free again yet
        self._numbers = itertools.cycle(first + (begin + i) % count for i in range(count))

    def randbelow(self, end: int) -> int:
        return next(self._numbers) % end


addresses.secrets = _PortsInTurn()  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Hides modules and tests from the garbage collector: they stay, and are most of all objects.

    Each full collection would take half a second and more. Collections of what is young are rare,
    too: a trace allocates much, and its garbage waits until the next.
    """
    gc.disable()
    before = dict(os.environ)
    try:
        collected = yield
        _require_unchanged(before)
        return collected
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        gc.enable()


_KEEP_PROGRAMS_S = 60.0
_dropped_s = time.monotonic()
# glibc keeps the pages that compilers free, gigabytes in an hour of tests; other systems lack this.
_trim_memory = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)


@pytest.fixture(autouse=True)
def programs_are_dropped() -> Iterator[None]:
    """JAX keeps what it has compiled: gigabytes, through which each garbage collection goes."""
    global _dropped_s
    yield
    if time.monotonic() - _dropped_s > _KEEP_PROGRAMS_S:
        jax.clear_caches()
        gc.collect()
        _trim_memory(0)
        _dropped_s = time.monotonic()


_HAS_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Notes that a test has failed: it may have ended anywhere, and left anything."""
    report = yield
    if report.failed:
        item.stash[_HAS_FAILED] = True
    return report


@pytest.fixture(autouse=True)
def unchanged_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a variable, a thread, a process, a strategy or a setting behind.

    It ends what was left: one failure makes no others. Of a test that failed, it only does that.
    """
    before = ProcessState.now()
    yield
    if request.node.stash.get(_HAS_FAILED, False):
        before.restore()
    elif left := before.changes():
        before.restore()
        pytest.fail("the test left the process changed: " + "; ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def tolerance() -> Callable[[object], dict[str, float]]:
    """The one table of tolerances: `assert_allclose(got, wanted, **tolerance("float32"))`.

    Integers and booleans must be equal. Where a test runs many operations one after the other, it
    multiplies: `tolerance(dtype)["rtol"] * 10`, and says why.
    """
    table = _RELATIVE_TOLERANCE["cpu" if jax.default_backend() == "cpu" else "gpu"]

    def of_dtype(dtype: object) -> dict[str, float]:
        name = np.dtype(dtype).name
        return {"rtol": table.get(name, 0.0), "atol": table.get(name, 0.0) / 10}

    return of_dtype
