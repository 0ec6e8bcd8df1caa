"""Self-test of an installation: every strategy, compared with NumPy."""

from __future__ import annotations

from stratagem.selftest.cases import CASES, Case, Outcome, run_case

__all__ = ["CASES", "Case", "Outcome", "run_case"]
