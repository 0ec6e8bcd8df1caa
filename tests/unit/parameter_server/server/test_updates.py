"""How updates are to be made."""

from __future__ import annotations

import pytest

from stratagem.parameter_server.server.updates import UpdateMode


@pytest.mark.parametrize("numbers", [{"num_needed": -1}, {"max_staleness": -1}])
def test_negative_numbers_are_refused(numbers) -> None:
    with pytest.raises(ValueError, match="has a negative number"):
        UpdateMode(**numbers)


def test_synchronous_updates_have_no_other_bound() -> None:
    with pytest.raises(ValueError, match="limits the staleness of synchronous updates"):
        UpdateMode(num_needed=2, max_staleness=0)
    assert UpdateMode(max_staleness=0).num_needed == 0
