"""`Watcher`: follows a run folder, and recomputes its account at a bounded cost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from stratagem.errors import NotFoundError
from stratagem.observe.goodput.account import Account, account_for
from stratagem.observe.monitoring.run_state import RunSnapshot, RunState
from stratagem.observe.run_events.reader import ProcessEvents, RunFollower

# At most this share of the time is spent on accounts, which take longer the longer a run is.
_ACCOUNT_SHARE = 0.05


class Watcher:
    """State and account of a growing run folder.

    `poll` reads new events only. `listeners` are called with the new events of each process.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], clock: Callable[[], float] = time.time
    ) -> None:
        self._follower = RunFollower(run_dir)
        self._state = RunState()
        self._clock = clock
        self._account: Account | None = None
        self._is_stale = False
        self._next_account_s = 0.0
        # A server of metrics and a view may share the watcher.
        self._lock = threading.Lock()
        self.listeners: list[Callable[[ProcessEvents], None]] = []

    def poll(self) -> RunSnapshot:
        """Reads new events and returns the state; the account follows if it is due."""
        with self._lock:
            return self._poll()

    def account(self) -> Account | None:
        """Returns the latest account; None without events."""
        return self._account

    def as_dict(self, state: RunSnapshot) -> dict[str, Any]:
        """Returns the state and the account, ready for JSON."""
        account = None if self._account is None else self._account.as_dict()
        return {**state.as_dict(), "account": account}

    def poll_existing(self) -> RunSnapshot:
        """Polls; raises NotFoundError if the folder has no readable events."""
        state = self.poll()
        self._follower.events()
        return state

    def _poll(self) -> RunSnapshot:
        news = self._follower.poll()
        now_s = self._clock()
        self._state.add(news, now_s)
        for one in news:
            for listener in self.listeners:
                listener(one)
        self._is_stale = self._is_stale or bool(news)
        state = self._state.snapshot(now_s)
        begin_s = time.perf_counter()
        if self._is_stale and (state.is_over or begin_s >= self._next_account_s):
            self._compute_account(begin_s)
        return state

    def _compute_account(self, begin_s: float) -> None:
        try:
            self._account = account_for(self._follower.events())
        except NotFoundError:
            return
        self._is_stale = False
        took_s = time.perf_counter() - begin_s
        self._next_account_s = begin_s + took_s / _ACCOUNT_SHARE
