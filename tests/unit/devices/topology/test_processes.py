"""Startup of JAX in several processes; most of it is tested by tests/multiprocess."""

from __future__ import annotations

from stratagem.launch.plan.ports import free_ports
from tests.fresh_process import run_fresh

_PROGRAM = """
import jax
jax.distributed.initialize("127.0.0.1:{port}", 1, 0, coordinator_bind_address="127.0.0.1:{port}")
from stratagem.devices.processes import end_coordination
print(jax.distributed.is_initialized())
end_coordination()
print(jax.distributed.is_initialized())
jax.distributed.initialize("127.0.0.1:{port}", 1, 0, coordinator_bind_address="127.0.0.1:{port}")
jax.devices()
end_coordination()  # too late: the backend has started with it
print(jax.distributed.is_initialized())
"""


def test_coordination_of_a_launcher_ends_before_jax_starts() -> None:
    (port,) = free_ports(1)
    printed = run_fresh(_PROGRAM.format(port=port), JAX_PLATFORMS="cpu")
    assert printed == ["True", "False", "True"]
