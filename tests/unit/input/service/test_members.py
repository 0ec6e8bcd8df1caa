"""Workers and consumers that a dispatcher has heard of."""

from __future__ import annotations

import pytest

from stratagem.input.service.job_starts import Members


def test_silent_workers_are_found_and_never_come_back() -> None:
    members = Members(None)
    assert members.hear_worker("a", "tcp://h:1", [], 0.0) == []
    members.hear_worker("b", "tcp://h:2", ["gpu"], 1.0)
    members.hear_worker("a", "tcp://h:1", [], 2.0)
    assert members.silent_workers(1.5) == ["b"]
    members.remove_worker("b")
    assert set(members.workers) == {"a"}
    assert members.lost == {"b"}
    assert members.num_listed is None
    assert members.reserved_for_others("a", may_wait=True) == set()


def test_a_worker_takes_the_address_of_its_former_self() -> None:
    members = Members(["h:1", "h:2"])
    members.hear_worker("a", "tcp://h:1", [], 0.0)
    assert members.hear_worker("again", "tcp://h:1", [], 1.0) == ["a"]
    members.remove_worker("a")
    assert members.workers["again"].index == 0


@pytest.mark.parametrize("listed", [["h:1", "g:2"], ["h", "g"], ["tcp://h:%port%", "g:%port%"]])
def test_listed_workers_have_splits_of_their_own(listed) -> None:
    members = Members(listed)
    members.hear_worker("g", "tcp://g:2", [], 0.0)
    assert members.workers["g"].index == 1
    assert members.num_listed == 2
    assert members.reserved_for_others("g", may_wait=True) == {0}
    assert members.reserved_for_others("g", may_wait=False) == set()
    members.hear_worker("h", "tcp://h:1", [], 0.0)
    assert members.reserved_for_others("g", may_wait=False) == {0}
    with pytest.raises(ValueError, match="A worker at h:7 asked to join"):
        members.hear_worker("more", "tcp://h:7", [], 0.0)
