"""The half of a worker in the conversation with the benchmark: a size, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from benchmarks.workers.protocol import serve_questions

__all__ = ["Answer", "serve_costs"]

Answer: TypeAlias = Mapping[str, Mapping[str, float]]
"""Seconds by cost, of "ours" and, for some axes, "by hand"."""


def serve_costs(measure: Callable[..., Answer]) -> None:
    """Answers each question by what a function measures with its fields as arguments."""
    serve_questions(lambda: lambda question: dict(measure(**question)))
