"""Tests with libraries of others, which `make test-external NAME=third-party` installs beside ours.

Elsewhere these tests are not collected, so that a run of all tests needs none of the libraries.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

import stratagem as sg
from validation.third_party.comparison import Numbers, plain_numbers

_LIBRARIES = (
    "equinox",
    "flax",
    "grain",
    "haiku",
    "keras_hub",
    "keras_rs",
    "keras_tuner",
    "optax",
    "sklearn",
)
_missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]

if _missing:
    collect_ignore_glob = ["test_*.py"]

_QUICK = ("one device", "two replicas")
_SERVERS = "one worker and one server"
_STRATEGIES: dict[str, Callable[[], Any]] = {
    "one device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "two replicas": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "three replicas": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
    _SERVERS: lambda: sg.ParameterServerStrategy(num_workers=1, num_servers=1),
}


def pytest_report_header() -> str | None:
    """Says what is missing where this folder is asked for by name."""
    if not _missing:
        return None
    libraries = ", ".join(_missing)
    return f"validation/third_party needs {libraries}: run `make test-external NAME=third-party`"


# Of other libraries about each other. Ours are RuntimeWarnings, which stay errors.
_FOREIGN_WARNINGS = (
    "default::DeprecationWarning",
    "default::FutureWarning",
    "default::UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(folder):
            for warning in _FOREIGN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in _STRATEGIES
    ]
)
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == _SERVERS and not hasattr(request.module, "PROGRAMS"):
        pytest.skip("a loop in the coordinator of parameter servers is refused")
    made = _STRATEGIES[request.param]()
    yield made
    if isinstance(made, sg.ParameterServerStrategy):
        made.close()


@pytest.fixture(scope="module")
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Numbers]:
    """What plain Keras makes of the programs that the module is named after."""
    module_name = request.module.__name__.rpartition(".test_")[2]
    return plain_numbers(module_name, tmp_path_factory.mktemp("plain"))


@pytest.fixture(autouse=True)
def ordinary_process() -> Iterator[None]:
    """Types are promoted as by default: the strict rule of our tests is not that of others.

    KerasHub reads by Grain, whose threads end when their iterator is collected.
    """
    with jax.numpy_dtype_promotion("standard"):
        yield
    gc.collect()
