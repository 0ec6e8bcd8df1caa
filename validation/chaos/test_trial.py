"""Trials: what is drawn repeats, and restrictions hold."""

from __future__ import annotations

import pytest

from validation.chaos.faults import KINDS
from validation.chaos.trial import draw


def test_trial_is_drawn_from_its_seed() -> None:
    assert draw(3, None, None) == draw(3, None, None)
    assert len({str(draw(seed, None, None).rounds) for seed in range(20)}) > 10


def test_restrictions_hold() -> None:
    for seed in range(10):
        trial = draw(seed, "elastic", "garbage")
        assert trial.job.name == "elastic"
        assert {kind.name for kinds in trial.rounds for kind in kinds} == {"garbage"}


def test_every_kind_is_drawn() -> None:
    trials = [draw(seed, None, None) for seed in range(500)]
    drawn = {kind.name for trial in trials for kinds in trial.rounds for kind in kinds}
    assert drawn == {kind.name for kind in KINDS}


def test_unknown_name_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"Unknown job None or fault 'flood'\. Expected one of"):
        draw(1, None, "flood")
