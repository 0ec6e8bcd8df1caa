"""TPUs that are not here, for their compiler: it needs libtpu, and no TPU."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.experimental import topologies

# Programs are compiled in a tenth of the time: the same sums, about the same temporary memory.
QUICKLY = {"exec_time_optimization_effort": -1.0}


def chips_of(name: str, **arguments: Any) -> list[jax.Device]:
    """Returns the devices of a TPU, `"v5e:2x4"` for example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")  # nobody to ask which TPU this is
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, **arguments)
    return list(description.devices)
