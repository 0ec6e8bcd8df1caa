"""Secret of a run, and the proof of it on every connection."""

from stratagem.authentication.credentials import Certificates, Credentials
from stratagem.authentication.secret import (
    Secret,
    find_secret,
    new_secret,
    required_secret,
    with_secret,
)

__all__ = [
    "Certificates",
    "Credentials",
    "Secret",
    "find_secret",
    "new_secret",
    "required_secret",
    "with_secret",
]
