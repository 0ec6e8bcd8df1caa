"""Turns of threads: one at a time starts a program on several devices."""

from __future__ import annotations

import threading

# Programs with collectives on the same devices wait for each other for ever if the devices start
# them in different orders. Strategies may share devices, so there is one turn for all.
starting = threading.RLock()
