"""Numbers of updates, of servers that are started again."""

from __future__ import annotations

import threading
from collections import Counter

from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.changes import Lifetime, SeenVersions, by_kind

FIRST, SECOND = Lifetime(10), Lifetime(20, restored_version=5)


def answer(lifetime: Lifetime, version: int, *applied: int) -> Message:
    return Message("ok", lifetime.fields(version, [*(applied or (0, 0, 0, 0)), version]))


def test_values_of_a_former_run_are_as_old_as_what_was_restored() -> None:
    assert SECOND.version_of({"version": 7, "lifetime": 20}) == 7
    assert SECOND.version_of({"version": 7, "lifetime": 10}) == 5
    assert SECOND.version_of({"version": 3, "lifetime": 10}) == 3
    assert FIRST.version_of({"version": 7, "lifetime": 9}) == 0


def test_lost_updates_are_counted_once_whoever_sees_it_and_in_whatever_order() -> None:
    seen = SeenVersions()
    seen.note(0, answer(FIRST, 8))
    seen.note(0, answer(FIRST, 6))  # of another thread, which came later
    assert by_kind(seen.losses).total() == 0
    seen.note(0, answer(SECOND, 6))
    assert by_kind(seen.losses).total() == 3
    seen.note(0, answer(FIRST, 9))  # late: no second restart, but one more update
    thread = threading.Thread(target=seen.note, args=(0, answer(SECOND, 7)))
    thread.start()
    thread.join()
    seen.note(1, answer(SECOND, 6))  # first seen now
    assert by_kind(seen.losses).total() == 4
    seen.note(0, answer(Lifetime(30, 7), 7))  # an orderly end
    assert by_kind(seen.losses).total() == 4
    seen.note(0, answer(Lifetime(40), 0))  # without a journal
    assert by_kind(seen.losses).total() == 11
    assert by_kind(seen.losses) == {"push": 11}


def test_clients_that_each_saw_the_last_update_of_one_run_lose_none_of_them() -> None:
    """One client saw the last update before the first restart, the other before the second."""
    runs = [FIRST, SECOND, Lifetime(30, restored_version=9)]
    seen = {client: SeenVersions() for client in "ab"}
    for client, versions in {"a": (8, 20, 9), "b": (7, 21, 9)}.items():
        for run, version in zip(runs, versions, strict=True):
            seen[client].note(0, answer(run, version))
    losses = Counter(seen["a"].losses) | Counter(seen["b"].losses)
    assert losses == {"0/10/push": 8 - 5, "0/20/push": 21 - 9}
    assert by_kind(losses) == {"push": 15}  # the larger of the clients' sums is 14


def test_lost_updates_of_all_kinds_are_counted_each_on_its_own() -> None:
    seen = SeenVersions()
    seen.note(0, answer(FIRST, 1, 4, 30, 2, 0))
    seen.note(0, answer(FIRST, 2, 4, 29, 2, 1))  # of another thread, which came later
    restored = Lifetime(20, restored_version=2, restored_applied=(5, 20, 1, 0, 2))
    for _ in range(2):
        seen.note(0, answer(restored, 2, 5, 20, 1, 0))
    assert by_kind(seen.losses) == {"assign_add": 10, "scatter": 1, "scatter_add": 1}
    assert by_kind(seen.losses).total() == 12


def test_oldest_value_that_a_gradient_was_computed_from_counts() -> None:
    seen = SeenVersions()
    assert seen.of(0, ["v"]) == {"lifetime": 0, "version": 0}
    seen.note(0, answer(FIRST, 3), ["v", "w"])
    seen.note(0, answer(FIRST, 4), ["table"])
    seen.note(1, answer(FIRST, 9), ["v"])
    assert seen.of(0, ["v", "table"]) == {"lifetime": 10, "version": 3}
    assert seen.of(0, ["table"]) == {"lifetime": 10, "version": 4}
    assert seen.of(0, ["never pulled"]) == {"lifetime": 10, "version": 4}
    seen.note(0, answer(SECOND, 5), ["v"])
    assert seen.of(0, ["v", "w"]) == {"lifetime": 10, "version": 3}
    assert seen.of(0, ["v"]) == {"lifetime": 20, "version": 5}


def test_each_thread_has_values_of_its_own() -> None:
    seen = SeenVersions()
    seen.note(0, answer(FIRST, 3), ["v"])
    told: list[dict[str, int]] = []
    thread = threading.Thread(target=lambda: told.append(seen.of(0, ["v"])))
    thread.start()
    thread.join()
    assert told == [{"lifetime": 0, "version": 0}]
