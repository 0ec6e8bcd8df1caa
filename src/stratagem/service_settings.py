"""Settings of services: the input service, and the server of jobs."""

from __future__ import annotations

from stratagem import environment

__all__ = ["input_service", "jobs_port", "upload_limit_bytes"]


def input_service() -> str:
    """Returns the address of the input service of this run.

    Returns:
        The value of `STRATAGEM_INPUT_SERVICE`, which `stratagem launch --input-workers` sets; ""
        for none.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_INPUT_SERVICE="10.0.0.1:5050"):
        ...     sg.config.input_service()
        '10.0.0.1:5050'

    Source: specific to Stratagem.
    """
    return environment.read("input_service")


def jobs_port() -> int:
    """Returns the port on which the leader's server accepts jobs of clients.

    Returns:
        The value of `STRATAGEM_JOBS_PORT`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_JOBS_PORT="9000"):
        ...     sg.config.jobs_port()
        9000

    Source: specific to Stratagem.
    """
    return environment.read("jobs_port")


def upload_limit_bytes() -> int:
    """Returns the maximum size of the files that a client sends with its program.

    Returns:
        The value of `STRATAGEM_UPLOAD_LIMIT_BYTES`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_UPLOAD_LIMIT_BYTES="1000000"):
        ...     sg.config.upload_limit_bytes()
        1000000

    Source: specific to Stratagem.
    """
    return environment.read("upload_limit_bytes")
