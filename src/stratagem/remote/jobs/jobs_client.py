"""The jobs of a Ray cluster, over HTTP: all that a client needs to reach is one port of the head.

These are the requests of Ray's own client for jobs. That one loads Ray, and goes elsewhere where
`RAY_ADDRESS` says so.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import Any

from stratagem.errors import UnavailableError
from stratagem.messages import explain
from stratagem.optional_libraries import load
from stratagem.remote.ray.ray_cluster import read_token

__all__ = ["JobState", "Jobs"]

_REQUEST_S = 30.0
_UPLOAD_S = 600.0
_NOT_FOUND = 404
_REFUSED = (401, 403)
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclasses.dataclass(frozen=True)
class JobState:
    """How a job is.

    Args:
        status: Ray's word for it.
        message: what Ray says of it.
        exit_code: of its program, when it has ended.
    """

    status: str
    message: str = ""
    exit_code: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it does not run any more."""
        return self.status in _ENDED


class Jobs:
    """Talks to the head of a Ray cluster.

    Args:
        url: of its dashboard, such as http://host:8265.
        token: that the cluster asks for; "" for none.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        token = read_token() if token is None else token
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def version(self) -> str:
        """Returns the version of Ray there.

        Raises:
            UnavailableError: nobody answers, or somebody else.
            PermissionError: the token is not that of the cluster.
        """
        return str(self._json("GET", "/api/version")["ray_version"])

    def resources(self) -> list[dict[str, float]]:
        """Returns the resources of each machine that is there."""
        answer = self._json("GET", "/api/v0/nodes?detail=1&limit=10000")
        nodes = answer["data"]["result"]["result"]
        return [node["resources_total"] or {} for node in nodes if node["state"] == "ALIVE"]

    def has_package(self, name: str) -> bool:
        """Returns whether a package was uploaded; it is kept for some minutes after that.

        Args:
            name: of the package.
        """
        return self._request("GET", f"/api/packages/gcs/{name}", may_miss=True) is not None

    def upload(self, name: str, content: bytes) -> None:
        """Puts a package where the machines of the cluster find it.

        Args:
            name: of the package.
            content: the archive.
        """
        self._request("PUT", f"/api/packages/gcs/{name}", content, timeout_s=_UPLOAD_S)

    def submit(self, entrypoint: str, runtime_env: Mapping[str, Any], **metadata: str) -> str:
        """Starts a job.

        Args:
            entrypoint: its command, for a shell.
            runtime_env: of Ray.
            **metadata: what is kept with it.

        Returns:
            Its name.
        """
        body = {"entrypoint": entrypoint, "runtime_env": dict(runtime_env), "metadata": metadata}
        return str(self._json("POST", "/api/jobs/", json.dumps(body).encode())["submission_id"])

    def state(self, job: str) -> JobState:
        """Returns how a job is.

        Args:
            job: its name.
        """
        found = self._json("GET", f"/api/jobs/{job}")
        return JobState(found["status"], found["message"] or "", found.get("driver_exit_code"))

    def running(self) -> dict[str, dict[str, str]]:
        """Returns the jobs that have not ended, each with what is kept with it."""
        return {
            str(one["submission_id"]): one.get("metadata") or {}
            for one in self._json("GET", "/api/jobs/")
            if one.get("submission_id") and not JobState(one["status"]).has_ended
        }

    def stop(self, job: str) -> None:
        """Ends a job: SIGTERM, and SIGKILL after a while.

        Args:
            job: its name.
        """
        self._request("POST", f"/api/jobs/{job}/stop", b"")

    async def log(self, job: str) -> AsyncIterator[str]:
        """Follows the log of a job, from its beginning to its end.

        Args:
            job: its name.

        Yields:
            The parts as they come.

        Raises:
            ImportError: aiohttp is not installed, which comes with Ray.
            UnavailableError: the connection was lost.
        """
        aiohttp = load("aiohttp", needed_by="the log of a job", install="stratagem[ray]")
        url = f"{self.url}/api/jobs/{job}/logs/tail"
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers) as session,
                session.ws_connect(url, max_msg_size=0, heartbeat=_REQUEST_S) as socket,
            ):
                async for message in socket:
                    if message.type == aiohttp.WSMsgType.TEXT:
                        yield message.data
                # A connection that was cut ends as one that was closed.
                code = socket.close_code
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._unavailable(error) from error
        if code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE:
            raise self._unavailable("the connection was cut")

    def _json(self, method: str, path: str, body: bytes | None = None) -> Any:
        content = self._request(method, path, body)
        try:
            return json.loads(content or b"")
        except ValueError as error:
            raise self._unavailable(f"{path} is answered by {(content or b'')[:100]!r}") from error

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        may_miss: bool = False,
        timeout_s: float = _REQUEST_S,
    ) -> bytes | None:
        request = urllib.request.Request(
            self.url + path,
            data=body,
            method=method,
            headers={**self._headers, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
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
                f"The cluster at {self.url} does not let this client in (HTTP {code}).",
                expected="the secret that its servers were started with.",
                fix="set RAY_AUTH_TOKEN to that, or RAY_AUTH_TOKEN_PATH to a file with it.",
            )
        )

    def _unavailable(self, reason: object) -> UnavailableError:
        return UnavailableError(
            explain(
                f"The cluster at {self.url} does not answer as it should: {reason}.",
                expected="the port for jobs of a leader that runs.",
                fix="look at what `stratagem server` prints there, and at address and port.",
            )
        )
