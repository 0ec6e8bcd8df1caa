"""Ray Train where it has started JAX before the strategy."""

from __future__ import annotations

from pathlib import Path

_PROGRAM = Path(__file__).parent / "programs" / "initialized.py"


def test_strategy_takes_over_the_coordination_that_ray_began(run, tmp_path: Path) -> None:
    printed = run(str(_PROGRAM), str(tmp_path))
    assert "metrics={'was': True, 'sum': 10, 'of': 2}" in printed  # of replicas 1 to 4
