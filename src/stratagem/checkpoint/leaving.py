"""Saving and leaving between the steps of a loop, when any process got notice."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

from stratagem.checkpoint.agreed_step import AgreedStep, Due
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.group import current_group
from stratagem.preemption import TerminationConfig
from stratagem.topology.process_exit import expect_exit

__all__ = ["Leaving", "tell"]

# Every process makes the same ones in the same order.
_numbers = itertools.count(1)


class Leaving:
    """Listens for notices, and lets all processes save after the same step and leave.

    Args:
        config: what counts as notice, and how to leave.
        manager: of what is saved.
        name: who says on stderr what was saved.

    Raises:
        RuntimeError: it cannot listen here, as outside the main thread.
    """

    def __init__(self, config: TerminationConfig, manager: CheckpointManager, name: str) -> None:
        self._config = config.for_environment()
        self._manager = manager
        self._name = name
        self._saved_after: int | None = None
        topic = f"leaving {next(_numbers)}"
        self._agreed_step = AgreedStep(self._config, current_group(), name=topic)
        self._agreed_step.start()

    def before_step(self, num_done: int, save: Callable[[], bool]) -> None:
        """Saves and leaves if that is due; called on every process before each step.

        Args:
            num_done: how many steps are done.
            save: saves, together with all others; returns whether there was something to save.

        Raises:
            SystemExit: it is saved; or what an `exit_fn` of one's own raises.
            DeadlineExceededError: a process does not say how far it is; the message names it.
        """
        while (due := self._agreed_step.next_step()) is not None:
            if self._saved_after != num_done:  # else the grace ended while it was saved
                self._save(num_done, save)
                self._saved_after = num_done
            if due is Due.LEAVE:
                self._leave()

    def stop(self) -> None:
        """Ends listening, and puts back the handlers of signals."""
        self._agreed_step.stop()

    def _save(self, num_done: int, save: Callable[[], bool]) -> None:
        begun_s = time.monotonic()
        if not save():
            return
        self._agreed_step.save_s = time.monotonic() - begun_s
        notice = self._agreed_step.notice
        reason = "another process got notice" if notice is None else notice.message
        tell(self._name, f"saved after step {num_done}: {reason}")

    def _leave(self) -> None:
        # No process ends before all have saved: what is written behind training is there by then,
        # and nobody takes from the others what they wait for.
        self._manager.sync()
        try:
            self._config.exit()
        except SystemExit as leaving:
            expect_exit(leaving.code)
            raise


def tell(name: str, text: str) -> None:
    """Says something on stderr.

    Args:
        name: who says it.
        text: what.
    """
    group = current_group()
    where = "" if group is None else f"{group.identity.label}: "
    print(f"{name}: {where}{text}", file=sys.stderr, flush=True)
