"""Standard input of a launcher started by SSH, which ends it when the terminal goes away."""

from __future__ import annotations

import os
import select
import signal
import threading
import time

from stratagem import environment

VARIABLE = "STRATAGEM_SSH_LEASE"
"""Set in the launcher of a host; it is not passed on to tasks."""
BEAT_S = 5.0
"""Interval between the empty lines that the terminal sends."""
# Longer than a short loss of the connection, which TCP repairs.
_LIMIT_S = 60.0
# After the grace time, for the report.
_MARGIN_S = 5.0


def hold_lease(grace_s: float) -> None:
    """Watches standard input if this launcher was started by SSH.

    A line has the number of a signal to raise here, or is empty. After the end, or a minute of
    silence, this process gets SIGTERM and, if it then takes too long, SIGKILL.
    """
    if environment.take(VARIABLE) is not None:
        watch = threading.Thread(target=_watch, args=(grace_s,), name="stratagem-ssh", daemon=True)
        watch.start()


def _watch(grace_s: float) -> None:
    rest = b""
    while select.select([0], [], [], _LIMIT_S)[0] and (data := os.read(0, 1024)):
        *lines, rest = (rest + data).split(b"\n")
        for line in filter(None, lines):
            os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s + _MARGIN_S)
    os.kill(os.getpid(), signal.SIGKILL)
