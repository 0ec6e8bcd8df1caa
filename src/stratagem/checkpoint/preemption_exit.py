"""Save-and-exit between the steps of a loop after a preemption notice."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

from stratagem import logs
from stratagem.checkpoint.agreed_step import AgreedStep, PreemptionAction
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.cluster.preemption.configuration import TerminationConfig
from stratagem.devices.process_exit import expect_exit
from stratagem.group.current import current_group
from stratagem.observe.run_events.process_writer import current_events

_logger = logging.getLogger(__name__)

# Every process creates the same instances in the same order.
_numbers = itertools.count(1)


class PreemptionExit:
    """Makes all processes save after the same step and exit, once any of them is notified."""

    def __init__(self, config: TerminationConfig, manager: CheckpointManager, name: str) -> None:
        self._config = config.for_environment()
        self._manager = manager
        self._name = name
        self._saved_after: int | None = None
        topic = f"preemption exit {next(_numbers)}"
        self._agreed_step = AgreedStep(self._config, current_group(), name=topic)
        self._agreed_step.start()

    def before_step(self, num_done: int, save: Callable[[], bool]) -> None:
        """Saves and exits if an action is due. Call on every process before each step.

        `save` is collective; it returns False if there was nothing to save. Raises SystemExit, or
        the error of a custom `exit_fn`.
        """
        while (due := self._agreed_step.next_step()) is not None:
            if self._saved_after != num_done:  # else the grace period ended during the save
                self._save(num_done, save)
                self._saved_after = num_done
            if due is PreemptionAction.EXIT:
                self._leave()

    def stop(self) -> None:
        """Stops listening and restores the signal handlers."""
        self._agreed_step.stop()

    def _save(self, num_done: int, save: Callable[[], bool]) -> None:
        begun_s = time.monotonic()
        if not save():
            return
        self._agreed_step.save_s = time.monotonic() - begun_s
        notice = self._agreed_step.notice
        reason = "another process was notified" if notice is None else notice.message
        print_status(self._name, f"saved after step {num_done}: {reason}")

    def _leave(self) -> None:
        # No process exits before all have saved and asynchronous writes are finished: an early
        # exit would break the collectives of the others.
        self._manager.sync()
        try:
            self._config.exit()
        except SystemExit as exit_error:
            expect_exit(exit_error.code)
            events = current_events()
            # Record the exit code now; it is not available when the program ends.
            if events is not None and isinstance(exit_error.code, int):
                events.end(exit_error.code, "left after notice")
            raise


def print_status(name: str, text: str) -> None:
    """Prints a status message with the name of this process to stderr."""
    group = current_group()
    where = "" if group is None else f"{group.identity.label}: "
    logs.announce(_logger, f"{name}: {where}{text}")
