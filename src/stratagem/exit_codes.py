"""Exit codes of the commands, of launched tasks, and of programs that save and exit."""

from __future__ import annotations

import signal

SUCCESS = 0
# An error, or a check that found something.
FAILURE = 1
# A wrong option, argument or command; click exits with it.
USAGE = 2
# Saved, to be resumed: the templates for Kubernetes and Slurm restart such a job.
RESUMABLE = 42
# Could not join others, which had ended, or admit no process: it has done nothing.
NOT_NEEDED = 43
# As shells report a program that a signal ended.
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
