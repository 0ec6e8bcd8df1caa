"""Peer: arrays as arguments and results of a Ray actor's methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from benchmarks.workers.call_times import answer_calls, values_of
from benchmarks.workers.protocol import serve_questions

__all__ = ["prepare"]

# Room for the largest array many times: Ray forgets an array only a while after its last use.
_STORE_BYTES = 2 * 10**9


class _Holder:
    def __init__(self) -> None:
        self._held = functools.lru_cache(maxsize=1)(values_of)

    def pull(self, size: int) -> np.ndarray[Any, Any]:
        return self._held(size)

    def push(self, values: np.ndarray[Any, Any]) -> float:
        return float(values[-1])


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Starts Ray and an actor; answers how long calls take."""
    ray.init(
        address="local",  # and not one that somebody else runs here
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=1,
        object_store_memory=_STORE_BYTES,
        configure_logging=False,
    )
    holder: Any = ray.remote(_Holder).remote()
    return answer_calls(
        lambda size: ray.get(holder.pull.remote(size)),
        lambda values: ray.get(holder.push.remote(values)),
    )


if __name__ == "__main__":
    serve_questions(prepare)
