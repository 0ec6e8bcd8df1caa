"""Self-test of an installation: every strategy, compared with NumPy."""

from __future__ import annotations

from stratagem.selftest.cases import CASES, Case, CaseOutcome, run_case

__all__ = ["CASES", "Case", "CaseOutcome", "run_case"]
