"""Some trials of the campaign with keyed tables, each in a sandbox of its own."""

from __future__ import annotations

import pytest

from validation.chaos.campaign import ROOT, run_trial
from validation.chaos.jobs import GOOD
from validation.chaos.sandbox import why_impossible


@pytest.mark.slow
@pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")
@pytest.mark.parametrize(
    ("seed", "fault"),
    [
        (506456969, "SIGKILL in a save"),  # both servers, before the first update
        (12, "SIGKILL in a journal entry"),
        (1095513148, "SIGKILL in a compaction"),
        (11, "SIGKILL in a flush"),
    ],
)
def test_tables_keep_their_promise(seed, fault) -> None:
    folder = ROOT / "runs" / "chaos" / "suite"
    folder.mkdir(parents=True, exist_ok=True)
    result = run_trial(seed, folder, "keyed tables", fault)
    assert result["outcome"] in GOOD, (result["outcome"], result["why"])
    assert result["faults"], result["skipped"]
