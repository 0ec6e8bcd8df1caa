"""Clients for Google Cloud's APIs and for the metadata server of its machines."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

from stratagem import environment
from stratagem.environment import load
from stratagem.errors import explain

_TIMEOUT_S = 10
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_INSTALL = "google-api-python-client google-auth"


def build_service(
    api: str, credentials: object, *, needed_by: str, discovery_url: str | None = None
) -> Any:
    """Returns a client of version 1 of a Google Cloud API ("compute" or "tpu").

    `credentials` come from `google.auth`, or are "default" for the environment's. Raises
    ImportError without Google's libraries.
    """
    discovery = load("googleapiclient.discovery", needed_by=needed_by, install=_INSTALL)
    if credentials is None or credentials == "default":
        auth = load("google.auth", needed_by=needed_by, install=_INSTALL)
        credentials, _ = auth.default(scopes=[_SCOPE])
    options = {} if discovery_url is None else {"discoveryServiceUrl": discovery_url}
    return discovery.build(api, "v1", credentials=credentials, cache_discovery=False, **options)


def metadata(path: str, *, instead: str) -> str:
    """Returns a text from the metadata server, with a path below `computeMetadata/v1/`.

    Raises RuntimeError, which suggests the argument `instead`, if the server does not answer.
    """
    host = (
        environment.lookup("GCE_METADATA_HOST")
        or environment.lookup("GCE_METADATA_IP")
        or "metadata.google.internal"
    )
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310 - http
            return response.read().decode()
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it keeps its connection open, and a caller may keep the error
        raise RuntimeError(
            explain(
                f"The metadata server {host} did not return {path!r}: {error}",
                expected="a Google Cloud machine.",
                fix=f"pass {instead}.",
            )
        ) from error
