"""HTTP client for the jobs of a Ray cluster, through one port of the head.

It sends the requests of Ray's client, which would import Ray and obey `RAY_ADDRESS`.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import Any

from stratagem.environment import load
from stratagem.errors import UnavailableError, explain
from stratagem.launch.remote.ray.ray_cluster import read_token
from stratagem.resources import Closing

_REQUEST_S = 30.0
_UPLOAD_S = 600.0
_NOT_FOUND = 404
_REFUSED = (401, 403)
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclasses.dataclass(frozen=True)
class JobState:
    """Status of a job, Ray's message, and the exit code of its program once it has ended."""

    status: str
    message: str = ""
    exit_code: int | None = None

    @property
    def has_ended(self) -> bool:
        """True once the job has ended."""
        return self.status in _ENDED


class JobsClient:
    """Sends requests to the head of a Ray cluster, at the URL of its dashboard.

    `token` is "" for none, None for the one on this machine.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                explain(
                    f"A job cannot be sent to {url!r}.",
                    expected="the address of the dashboard of a Ray cluster.",
                    fix="pass HOST:8265, or a URL that begins with http:// or https://.",
                )
            )
        self.url = url.rstrip("/")
        token = read_token() if token is None else token
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def version(self) -> str:
        """Returns the cluster's version of Ray; raises UnavailableError or PermissionError."""
        return str(self._json("GET", "/api/version")["ray_version"])

    def resources(self) -> list[dict[str, float]]:
        """Returns the resources of each machine that has joined."""
        answer = self._json("GET", "/api/v0/nodes?detail=1&limit=10000")
        nodes = answer["data"]["result"]["result"]
        return [node["resources_total"] or {} for node in nodes if node["state"] == "ALIVE"]

    def has_package(self, name: str) -> bool:
        """Returns True if a package is stored; Ray keeps one for some minutes."""
        return self._request("GET", f"/api/packages/gcs/{name}", may_miss=True) is not None

    def upload(self, name: str, content: bytes) -> None:
        """Uploads an archive for the machines of the cluster."""
        self._request("PUT", f"/api/packages/gcs/{name}", content, timeout_s=_UPLOAD_S)

    def submit(self, entrypoint: str, runtime_env: Mapping[str, Any], **metadata: str) -> str:
        """Starts a job, a command for a shell, and returns its name; stores `metadata` with it."""
        body = {"entrypoint": entrypoint, "runtime_env": dict(runtime_env), "metadata": metadata}
        return str(self._json("POST", "/api/jobs/", json.dumps(body).encode())["submission_id"])

    def state(self, job: str) -> JobState:
        """Returns the state of a job."""
        found = self._json("GET", f"/api/jobs/{job}")
        return JobState(found["status"], found["message"] or "", found.get("driver_exit_code"))

    def running(self) -> dict[str, dict[str, str]]:
        """Returns the metadata of the jobs that have not ended."""
        return {
            str(one["submission_id"]): one.get("metadata") or {}
            for one in self._json("GET", "/api/jobs/")
            if one.get("submission_id") and not JobState(one["status"]).has_ended
        }

    def stop(self, job: str) -> None:
        """Stops a job with SIGTERM, and SIGKILL after a while."""
        self._request("POST", f"/api/jobs/{job}/stop", b"")

    async def log(self, job: str) -> AsyncIterator[str]:
        """Yields "" once connected, then parts of a job's log as they arrive.

        Raises UnavailableError if the connection breaks.
        """
        aiohttp = load("aiohttp", needed_by="the log of a job", install="stratagem[ray]")
        url = f"{self.url}/api/jobs/{job}/logs/tail"
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers) as session,
                session.ws_connect(url, max_msg_size=0, heartbeat=_REQUEST_S) as socket,
            ):
                yield ""
                async for message in socket:
                    if message.type == aiohttp.WSMsgType.TEXT:
                        yield message.data
                # The loop ends in the same way if the connection was cut.
                code = socket.close_code
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._unavailable(error) from error
        if code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE:
            raise self._unavailable("the connection was lost")

    def _json(self, method: str, path: str, body: bytes | None = None) -> Any:
        content = self._request(method, path, body)
        try:
            return json.loads(content or b"")
        except ValueError as error:
            raise self._unavailable(f"{path} returned {(content or b'')[:100]!r}") from error

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        may_miss: bool = False,
        timeout_s: float = _REQUEST_S,
    ) -> bytes | None:
        request = urllib.request.Request(  # noqa: S310 - http or https
            self.url + path,
            data=body,
            method=method,
            headers={**self._headers, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                if error.code == _NOT_FOUND and may_miss:
                    return None
                if error.code in _REFUSED:
                    raise self._refused(error.code) from error
                raise self._unavailable(f"{error.code} {error.read()[-500:]!r}") from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from error

    def _refused(self, code: int) -> PermissionError:
        return PermissionError(
            explain(
                f"The cluster at {self.url} refused this client (HTTP {code}).",
                expected="the token with which its servers were started.",
                fix="set RAY_AUTH_TOKEN to it, or RAY_AUTH_TOKEN_PATH to a file that contains it.",
                code="SG513",
            )
        )

    def _unavailable(self, reason: object) -> UnavailableError:
        return UnavailableError(
            explain(
                f"The cluster at {self.url} is not available: {reason}.",
                expected="a running leader that accepts jobs at this port.",
                fix="check address and port, and the output of `stratagem server` on the leader.",
                code="SG514",
            )
        )


# Lease of a client, so that its job ends when the client is gone.
#
# The client uploads small packages with increasing numbers in their names, and the job asks for
# the next one, so only the port for jobs is needed. Ray deletes such packages after some minutes.


# Number of renewals within the limit.
_RENEWALS = 6
_CLOSING_S = 2.0


class Lease(Closing):
    """Renews the lease of a job until it is closed; without it the job ends after `limit_s`."""

    def __init__(self, jobs: JobsClient, nonce: str, limit_s: float) -> None:
        self._jobs = jobs
        self._nonce = nonce
        self._pause_s = limit_s / _RENEWALS
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="client lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the renewals."""
        self._is_closed.set()
        self._thread.join(_CLOSING_S)  # it may wait for an answer that will not come

    def _renew(self) -> None:
        number = 1
        while not self._is_closed.is_set():
            try:
                self._jobs.upload(_name(self._nonce, number), b"-")
            except (UnavailableError, PermissionError):
                pass  # tried again; following the log reports the error
            else:
                number += 1
            self._is_closed.wait(self._pause_s)


class LeaseWatch:
    """Checks in a job whether its client renews the lease."""

    def __init__(self, jobs: JobsClient, nonce: str, limit_s: float) -> None:
        self._jobs = jobs
        self._nonce = nonce
        self._limit_s = limit_s
        self._number = 1
        self._seen_s = time.monotonic()

    def is_over(self) -> bool:
        """Returns True if the lease was not renewed within the limit."""
        try:
            while self._jobs.has_package(_name(self._nonce, self._number)):
                self._number += 1
                self._seen_s = time.monotonic()
        except UnavailableError:
            self._seen_s = time.monotonic()  # no client could renew now
        return time.monotonic() - self._seen_s > self._limit_s

    @property
    def pause_s(self) -> float:
        """Seconds between two checks."""
        return self._limit_s / _RENEWALS


def _name(nonce: str, number: int) -> str:
    return f"stratagem_client_{nonce}_{number}.zip"
