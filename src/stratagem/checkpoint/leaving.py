"""Saving and leaving between the steps of somebody else's loop, when any process got notice."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from stratagem.checkpoint.agreed_step import AgreedStep, Due
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.group import current_group
from stratagem.preemption import TerminationConfig
from stratagem.topology.ending import expect_exit

__all__ = ["Leaving", "leave"]

# Every process makes the same ones in the same order.
_numbers = itertools.count(1)


class Leaving:
    """Listens for notices, and lets all processes save after the same step and leave.

    Args:
        config: what counts as notice, and how to leave.
        manager: of what is saved.

    Raises:
        RuntimeError: it cannot listen here, as outside the main thread.
    """

    def __init__(self, config: TerminationConfig, manager: CheckpointManager) -> None:
        self._config = config.for_environment()
        self._manager = manager
        name = f"leaving between {next(_numbers)}"
        self._agreed = AgreedStep(self._config, current_group(), name=name)
        self._agreed.start()

    def before_step(self, save: Callable[[], object]) -> None:
        """Saves and leaves if that is due; called on every process before each step.

        Args:
            save: saves, together with all others.

        Raises:
            SystemExit: it is saved; or what an `exit_fn` of one's own raises.
            DeadlineExceededError: a process does not say how far it is; the message names it.
        """
        has_saved = False
        while (due := self._agreed.next_step()) is not None:
            if not has_saved:
                save()
                has_saved = True
            if due is Due.LEAVE:
                leave(self._manager, self._config)

    def stop(self) -> None:
        """Ends listening, and puts back the handlers of signals."""
        self._agreed.stop()


def leave(manager: CheckpointManager, config: TerminationConfig) -> None:
    """Ends this process as agreed, when all processes have saved. Call on every process.

    Args:
        manager: of what was saved: what is written behind training is there when this returns.
        config: says how to end.

    Raises:
        SystemExit: or what an `exit_fn` of one's own raises.
    """
    # Nobody takes from the others what they wait for.
    manager.sync()
    try:
        config.exit()
    except SystemExit as leaving:
        expect_exit(leaving.code)
        raise
