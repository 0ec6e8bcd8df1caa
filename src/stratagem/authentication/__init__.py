"""Secret of a run, and the proof of it on every connection."""

from stratagem.authentication.credentials import Certificates, Credentials
from stratagem.authentication.secret import (
    Secret,
    find_secret,
    has_ray_token,
    new_secret,
    ray_token_file,
    required_secret,
    with_ray_token,
    with_secret,
)

__all__ = [
    "Certificates",
    "Credentials",
    "Secret",
    "find_secret",
    "has_ray_token",
    "new_secret",
    "ray_token_file",
    "required_secret",
    "with_ray_token",
    "with_secret",
]
