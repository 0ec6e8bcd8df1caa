"""Processes of several hosts reach one another, whatever the hosts call themselves."""

from __future__ import annotations

import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster
from tests.multiprocess.namespaces import can_make_hosts, hosts, knowing


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2")
# Gloo connects from the higher address to the lower one.
@pytest.mark.parametrize("network", ["10.77.0", "192.168.77"])
def test_host_of_process_0_calls_itself_127_0_1_1(network: str) -> None:
    """As Debian does; a second worker runs there, a third one on another host."""
    with (
        hosts(2, network) as ((first, _), (other, _)),
        knowing(first, "leader", "127.0.1.1"),
        knowing(other, "leader", f"{network}.1"),
    ):
        three = [(first, "leader:2222"), (first, "leader:2223"), (other, f"{network}.2:2222")]
        every = run_cluster([str(PROGRAMS / "failing.py"), "nothing", "loop"], 3, three)
    for one in every:
        assert one.code == 0, one.errors
        assert one.output.endswith("done\n")
