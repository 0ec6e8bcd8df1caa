"""The checks of a GPU, each in a process of its own; skipped without one."""

from __future__ import annotations

import pytest

from stratagem.cluster.accelerators import local_gpus
from validation.gpu import checks, register
from validation.gpu.__main__ import run_check
from validation.gpu.checks import CHECKS

pytestmark = pytest.mark.gpu

assert register


@pytest.mark.parametrize("name", [name for name, one in CHECKS.items() if not one.is_alone])
def test_check_passes(name) -> None:
    if not checks.is_on_cpu() and not local_gpus():
        pytest.skip("this machine has no NVIDIA GPU; STRATAGEM_GPU_CHECKS_ON=cpu is a dry run")
    passed, _, last = run_check(CHECKS[name])
    assert passed, f"{last}\n{checks.loaded(name).get('error')}"
