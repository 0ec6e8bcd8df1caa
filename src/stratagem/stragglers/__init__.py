"""Workers for which the others wait: who, why, and what it costs. Does not import JAX."""

from stratagem.stragglers.attribution import (
    Assessment,
    Cause,
    Straggler,
    find_stragglers,
    sentence,
)
from stratagem.stragglers.cost import RunCost, WorkerCost, cost_of
from stratagem.stragglers.eviction import EvictionRule, choose_eviction, slow_since
from stratagem.stragglers.lines import SettledLines
from stratagem.stragglers.windows import Window, WorkerTimes, windows_of

__all__ = [
    "Assessment",
    "Cause",
    "EvictionRule",
    "RunCost",
    "SettledLines",
    "Straggler",
    "Window",
    "WorkerCost",
    "WorkerTimes",
    "choose_eviction",
    "cost_of",
    "find_stragglers",
    "sentence",
    "slow_since",
    "windows_of",
]
