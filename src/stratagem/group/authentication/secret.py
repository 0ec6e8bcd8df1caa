"""Secret that the processes of a run share; all keys are derived from it.

Source: RFC 5869 (HKDF): one key per purpose, so that no port can be used against another.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
import stat
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

from stratagem import environment
from stratagem.cluster.addresses import is_loopback
from stratagem.messages import explain

_VARIABLE, _FILE_VARIABLE = "STRATAGEM_SECRET", "STRATAGEM_SECRET_FILE"
_MIN_LENGTH = 32
_MAKE = (
    "make one secret for the whole run, stratagem secret --file run.secret, and set "
    "STRATAGEM_SECRET_FILE to a copy of it on every host"
)


@final
class Secret:
    """A secret text. Raises ValueError if it is too short; `source` names its origin in errors."""

    def __init__(self, text: str, source: str = _VARIABLE) -> None:
        if len(text) < _MIN_LENGTH:
            raise ValueError(
                explain(
                    f"{source} has a secret of {len(text)} characters.",
                    expected=f"at least {_MIN_LENGTH}, which cannot be guessed.",
                    fix=f"make one: {_MAKE}.",
                    code="SG515",
                )
            )
        self._text = text

    def __repr__(self) -> str:
        return "Secret(...)"  # messages are logged

    def key(self, purpose: str) -> bytes:
        """Returns 32 bytes for one purpose, the same in all processes."""
        return _key(self._text.encode(), purpose)

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that hand the secret to another process."""
        return {_VARIABLE: self._text}


def key_of(secret: Secret | None, purpose: str) -> bytes:
    """Returns the key for a purpose; without a secret, one that everybody can compute."""
    return _key(b"", purpose) if secret is None else secret.key(purpose)


def _key(secret: bytes, purpose: str) -> bytes:
    return hmac.digest(secret, b"stratagem 1 " + purpose.encode(), hashlib.sha256)


def new_secret() -> str:
    """Returns a random secret of 256 bits, as text."""
    return secrets.token_hex(32)


def find_secret() -> Secret | None:
    """Returns the secret of this run, from `STRATAGEM_SECRET` or `STRATAGEM_SECRET_FILE`.

    Returns None without either. Raises ValueError if the secret is too short, or its file cannot be
    read or may be read by others.
    """
    text = environment.lookup(_VARIABLE)
    if text is not None:
        return Secret(text)
    name = environment.lookup(_FILE_VARIABLE)
    return None if name is None else Secret(_read(Path(name).expanduser()), f"The file {name}")


def _read(path: Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode)
            is_own = status.st_uid in (os.getuid(), 0)
            if is_own and not mode & 0o077:
                return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            explain(
                f"The secret in {path} cannot be read: {error}.",
                expected=f"the text file that {_FILE_VARIABLE} names.",
                fix=f"make one: stratagem secret --file {path}",
                code="SG515",
            )
        ) from error
    raise ValueError(
        explain(
            f"The secret in {path} has mode {mode:04o} and belongs to user {status.st_uid}: others "
            "can read or change it.",
            expected="mode 0600, and this user as its owner.",
            fix=f"chmod 0600 {path}; make a new secret if others may have read it.",
            code="SG515",
        )
    )


def required_secret(
    who: str, hosts: Iterable[str], *, allow_unauthenticated: bool = False
) -> Secret | None:
    """Returns the secret of this run; None without one on loopback, or if that is allowed.

    `who` is this process in messages, `hosts` are those of the run. Without a secret, only loopback
    addresses are accepted, unless `allow_unauthenticated` or `STRATAGEM_ALLOW_UNAUTHENTICATED` is
    set, which warns once. Raises ValueError as `find_secret`, and if there is no secret.
    """
    secret = find_secret()
    others = sorted({host for host in hosts if not is_loopback(host)})
    if secret is not None or not others:
        return secret
    if not (allow_unauthenticated or environment.read("allow_unauthenticated")):
        raise ValueError(
            explain(
                f"{who} has no secret, and the run uses the network: {_listed(others)}.",
                expected="a secret that all processes of the run share, since strangers could "
                "join otherwise.",
                fix=f"{_MAKE}. On a network that only this run can reach, "
                "STRATAGEM_ALLOW_UNAUTHENTICATED=1 does without.",
                code="SG515",
            )
        )
    _warn_once()
    return None


def _listed(hosts: list[str]) -> str:
    more = len(hosts) - 3
    return ", ".join(hosts[:3]) + (f" and {more} more" if more > 0 else "")


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        explain(
            "This run has no secret: any program that reaches its ports can join it.",
            expected="a secret that all processes of the run share.",
            fix=f"{_MAKE}; then drop allow_unauthenticated.",
            code="SG515",
        ),
        stacklevel=2,
    )


def with_secret(base: Mapping[str, str]) -> dict[str, str]:
    """Returns variables for child processes, with a new secret if they have none."""
    given = base.get(_VARIABLE, "").strip() or base.get(_FILE_VARIABLE, "").strip()
    return dict(base) if given else {**base, _VARIABLE: new_secret()}


def ray_token_file() -> Path:
    """Returns the file in which Ray looks for a token unless a variable names another."""
    return Path.home() / ".ray" / "auth_token"


def has_ray_token(base: Mapping[str, str]) -> bool:
    """Returns True if a process with these variables finds a token for Ray."""
    named = (base.get(name, "").strip() for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return any(named) or ray_token_file().exists()


def with_ray_token(base: Mapping[str, str]) -> dict[str, str]:
    """Returns variables for child processes, with a new token if they start Ray without one."""
    has_own_ray = base.get("RAY_ADDRESS", "").strip()  # it has a token of its own, or none
    is_off = base.get("RAY_AUTH_MODE", "").strip() == "disabled"
    if has_own_ray or is_off or has_ray_token(base):
        return dict(base)
    return {**base, "RAY_AUTH_TOKEN": new_secret()}
