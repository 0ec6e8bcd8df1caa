"""Both ways to run a replica function, as in the contract suite."""

from __future__ import annotations

from tests.contract.conftest import execution

__all__ = ["execution"]
