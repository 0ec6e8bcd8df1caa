"""Programs with a worker and a server in processes of their own equal one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parameter_server.keras.server_programs import PROGRAMS
from tests.slow_rows import slow_but_for
from tests.third_party.comparison import assert_like_plain_keras
from tests.third_party.programs.measuring import Place, run_program

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

_QUICK = ("functional_model_with_a_stateless_step", "optimizer_without_a_config")


@pytest.fixture(scope="module")
def servers() -> Iterator[Any]:
    """One server, and a worker with two devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "2")
        with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
            yield strategy


@pytest.fixture(autouse=True)
def ordinary_process() -> Iterator[None]:
    """Types are promoted as by default: the strict rule of our tests is not that of users."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", slow_but_for(_QUICK, PROGRAMS))
def test_program_equals_one_device(servers: Any, name: str) -> None:
    one = sg.OneDeviceStrategy("cpu:0")
    expected = run_program(PROGRAMS[name], Place(one.scope, one))
    assert_like_plain_keras(PROGRAMS[name], servers, expected)
