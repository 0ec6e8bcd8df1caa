"""Module after whose import the second fork of a process fails, as where memory is short."""

import errno
import os

_fork, _calls = os.fork, []


def _fork_or_fail() -> int:
    _calls.append(None)
    if len(_calls) == 2:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return _fork()


os.fork = _fork_or_fail
