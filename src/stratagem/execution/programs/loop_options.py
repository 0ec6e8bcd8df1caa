"""Compiler options of a program that loops over steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem import environment
from stratagem.context.function_trace import current_function_trace
from stratagem.summary.collector import is_tracing

if TYPE_CHECKING:
    from stratagem.topology import Topology

__all__ = ["loop_options"]

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
