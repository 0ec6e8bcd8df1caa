"""Time limits from environment variables, in seconds; public as functions of `sg.config`."""

from __future__ import annotations

from stratagem import environment

__all__ = [
    "barrier_timeout_s",
    "checkpoint_timeout_s",
    "client_timeout_s",
    "handshake_timeout_s",
    "join_timeout_s",
    "peer_timeout_s",
    "pod_grace_s",
    "save_timeout_s",
    "stuck_timeout_s",
]


def barrier_timeout_s() -> float:
    """Returns how long processes wait for each other at a barrier, in seconds.

    Returns:
        The value of `STRATAGEM_BARRIER_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_BARRIER_TIMEOUT_S="60"):
        ...     sg.config.barrier_timeout_s()
        60.0

    Source: specific to Stratagem.
    """
    return environment.read("barrier_timeout_s")


def checkpoint_timeout_s() -> float:
    """Returns how long an evaluator waits for the next checkpoint, in seconds.

    Returns:
        The value of `STRATAGEM_CHECKPOINT_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_CHECKPOINT_TIMEOUT_S="3600"):
        ...     sg.config.checkpoint_timeout_s()
        3600.0

    Source: specific to Stratagem.
    """
    return environment.read("checkpoint_timeout_s")


def client_timeout_s() -> float:
    """Returns how long a job that ends with its client runs while the client is silent.

    Returns:
        The value of `STRATAGEM_CLIENT_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_CLIENT_TIMEOUT_S="20"):
        ...     sg.config.client_timeout_s()
        20.0

    Source: specific to Stratagem.
    """
    return environment.read("client_timeout_s")


def handshake_timeout_s() -> float:
    """Returns how long a new connection may take to prove the secret of the run.

    Returns:
        The value of `STRATAGEM_HANDSHAKE_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_HANDSHAKE_TIMEOUT_S="30"):
        ...     sg.config.handshake_timeout_s()
        30.0

    Source: specific to Stratagem.
    """
    return environment.read("handshake_timeout_s")


def join_timeout_s() -> float:
    """Returns how long the processes of a cluster wait for each other at startup, in seconds.

    Returns:
        The value of `STRATAGEM_JOIN_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_JOIN_TIMEOUT_S="900"):
        ...     sg.config.join_timeout_s()
        900.0

    Source: specific to Stratagem.
    """
    return environment.read("join_timeout_s")


def peer_timeout_s() -> float:
    """Returns how long a process may be silent before it counts as lost, in seconds.

    Returns:
        The value of `STRATAGEM_PEER_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_PEER_TIMEOUT_S="5"):
        ...     sg.config.peer_timeout_s()
        5.0

    Source: specific to Stratagem.
    """
    return environment.read("peer_timeout_s")


def pod_grace_s() -> float:
    """Returns the seconds that Kubernetes gives a pod from SIGTERM to SIGKILL.

    Returns:
        The value of `STRATAGEM_POD_GRACE_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_POD_GRACE_S="60"):
        ...     sg.config.pod_grace_s()
        60.0

    Source: specific to Stratagem.
    """
    return environment.read("pod_grace_s")


def save_timeout_s() -> float:
    """Returns how long processes wait for another to read or write a checkpoint.

    Returns:
        The value of `STRATAGEM_SAVE_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_SAVE_TIMEOUT_S="600"):
        ...     sg.config.save_timeout_s()
        600.0

    Source: specific to Stratagem.
    """
    return environment.read("save_timeout_s")


def stuck_timeout_s() -> float:
    """Returns how long a process may make no progress while others wait for it, in seconds.

    Returns:
        The value of `STRATAGEM_STUCK_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_STUCK_TIMEOUT_S="600"):
        ...     sg.config.stuck_timeout_s()
        600.0

    Source: specific to Stratagem.
    """
    return environment.read("stuck_timeout_s")
