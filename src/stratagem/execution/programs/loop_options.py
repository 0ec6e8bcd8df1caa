"""Compiler options of a program, and if it unrolls its loop over steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from stratagem import environment
from stratagem.contexts import current_function_trace
from stratagem.execution.analysis.replication import contains_primitive
from stratagem.execution.summary.collector import is_tracing

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

    from stratagem.devices.mesh import Topology
    from stratagem.execution.tracing.trace import Trace


# XLA:GPU since 0.11 copies a step's slice of an input, such as the labels, on a second stream. An
# asynchronous operation has the whole loop reordered for overlap, without regard for memory or
# caches: all gradients of weights, then all updates. ResNet-50 then takes 2.3 GB more.
_COPIES_OF_SLICES = "dynamic-slice-copy-fusion-async-wrapper"


def loop_options(topology: Topology) -> dict[str, str] | None:
    """Returns the options for a loop over steps on these devices; None for XLA's defaults.

    JAX accepts none for a program that is called within another one.
    """
    if topology.platform != "gpu" or current_function_trace() is not None or is_tracing():
        return None
    # An option replaces the value of XLA_FLAGS.
    return {
        "xla_disable_hlo_passes": ",".join([*environment.disabled_xla_passes(), _COPIES_OF_SLICES])
    }


def sequence_options(trace: Trace, topology: Topology) -> dict[str, str] | None:
    """Returns the options for sequences in parts on TPUs; None without, or within another program.

    The compiler would pass keys and values on in a ring while it computes with each part. It then
    keeps the scores of all parts, which takes three times the memory. So it has to gather them.
    """
    is_within = current_function_trace() is not None
    if not trace.splits_sequences or topology.platform != "tpu" or is_within:
        return None
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def unrolls_steps(jaxpr: Jaxpr, topology: Topology) -> bool:
    """Returns True if the loop over steps is unrolled.

    XLA:CPU computes gradients of convolutions 30 times slower in a loop body.
    """
    devices = topology.devices or jax.local_devices()
    return devices[0].platform == "cpu" and contains_primitive(jaxpr, "conv_general_dilated")
