"""Settings of authentication and encryption, from environment variables; public in `sg.config`."""

from __future__ import annotations

from stratagem import environment

__all__ = [
    "allow_unauthenticated",
    "max_handshakes",
    "max_handshakes_per_address",
    "secret_file",
    "tls_dir",
]


def allow_unauthenticated() -> bool:
    """Returns True if a run on several hosts may do without a secret.

    Returns:
        The value of `STRATAGEM_ALLOW_UNAUTHENTICATED`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_ALLOW_UNAUTHENTICATED="1"):
        ...     sg.config.allow_unauthenticated()
        True

    Source: specific to Stratagem.
    """
    return environment.read("allow_unauthenticated")


def max_handshakes() -> int:
    """Returns how many connections of a port may prove the secret at the same time.

    Returns:
        The value of `STRATAGEM_MAX_HANDSHAKES`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_MAX_HANDSHAKES="512"):
        ...     sg.config.max_handshakes()
        512

    Source: specific to Stratagem.
    """
    return environment.read("max_handshakes")


def max_handshakes_per_address() -> int:
    """Returns how many connections from one address may prove the secret at the same time.

    Returns:
        The value of `STRATAGEM_MAX_HANDSHAKES_PER_ADDRESS`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_MAX_HANDSHAKES_PER_ADDRESS="128"):
        ...     sg.config.max_handshakes_per_address()
        128

    Source: specific to Stratagem.
    """
    return environment.read("max_handshakes_per_address")


def secret_file() -> str:
    """Returns the name of the file with the secret of the run.

    Returns:
        The value of `STRATAGEM_SECRET_FILE`; "" for none.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_SECRET_FILE="~/run.secret"):
        ...     sg.config.secret_file()
        '~/run.secret'

    Source: specific to Stratagem.
    """
    return environment.read("secret_file")


def tls_dir() -> str:
    """Returns the folder with the certificate of this process and its authority.

    Returns:
        The value of `STRATAGEM_TLS_DIR`; "" for none.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_TLS_DIR="/etc/tls"):
        ...     sg.config.tls_dir()
        '/etc/tls'

    Source: specific to Stratagem.
    """
    return environment.read("tls_dir")
