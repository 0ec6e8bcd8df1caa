"""Preemption and maintenance notices from Google Cloud's metadata server."""

from __future__ import annotations

import dataclasses
import http.client
import threading
import time
from pathlib import Path

from stratagem import environment
from stratagem.cluster.google_cloud import metadata
from stratagem.cluster.preemption.notices import Notice, NoticeSource

# The server answers when a value changes, or after this time. This also bounds the delay of a
# change between two requests, and how long a thread runs after `stop`. It must be less than the
# timeout in `metadata`.
_WAIT_S = 5
_PAUSE_S = 1.0
# The server is on the same host, but sometimes does not answer.
_MAX_SILENCE_S = 60.0
_ALTERNATIVE = "a TerminationConfig with sources or with a termination_watcher_fn"
_PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")


@dataclasses.dataclass(frozen=True)
class _Key:
    """A value of the metadata server, its text in case of a notice, and the meaning of that."""

    path: str
    alarm: str
    message: str
    grace_s: float | None


_KEYS = (
    _Key("instance/preempted", "TRUE", "Google Cloud preempts this Spot VM.", 30.0),
    _Key(
        "instance/maintenance-event",
        "TERMINATE_ON_HOST_MAINTENANCE",
        "Google Cloud stops this VM for maintenance of its host.",
        None,
    ),
)


def on_google_cloud() -> bool:
    """Detects a Google Cloud VM without network access.

    Returns:
        True if the firmware says so, or `GCE_METADATA_HOST` or `GCE_METADATA_IP` is set.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", GCE_METADATA_HOST="169.254.169.254"):
        ...     sg.preemption.on_google_cloud()
        True

    Source: TF 2.21 failure_handling_util.py, on_gcp.
    """
    if environment.lookup("GCE_METADATA_HOST") or environment.lookup("GCE_METADATA_IP"):
        return True
    try:
        return _PRODUCT_NAME.read_text().startswith("Google")
    except OSError:
        return False


class GoogleCloudSource(NoticeSource):
    """Receives preemption and maintenance notices from the metadata server.

    A Spot VM has 30 seconds after its notice. Maintenance leaves an hour for VMs with GPUs and a
    minute for others; the server does not say which. Live migration gives no notice. If the server
    does not answer for a minute, `notice` and `wait` raise an error.

    Example:
        >>> source = sg.preemption.GoogleCloudSource()  # `with source:` asks the metadata server
        >>> source.hear(sg.preemption.Notice(  # the server's answer, once the VM is preempted
        ...     source="metadata", message="This VM is preempted.", heard_at_s=0.0, grace_s=30.0))
        >>> source.notice.grace_s
        30.0

    Source: TF 2.21 failure_handling_util.py, termination_watcher_function_gce; Google Cloud's pages
    "Query metadata server for maintenance event notices" and "Create and use Spot VMs".
    """

    def __init__(self) -> None:
        super().__init__()
        self._stopped = threading.Event()

    def _listen(self) -> None:
        texts = [metadata(key.path, instead=_ALTERNATIVE) for key in _KEYS]
        for key, text in zip(_KEYS, texts, strict=True):
            if self._is_alarm(key, text):
                continue
            name = f"stratagem-notice-{key.path.rpartition('/')[2]}"
            threading.Thread(target=self._watch, args=(key,), name=name, daemon=True).start()

    def _end(self) -> None:
        self._stopped.set()

    def _watch(self, key: _Key) -> None:
        try:
            self._poll(key)
        except Exception as error:  # noqa: BLE001 - `notice` raises it in the calling thread
            self.fail(error)

    def _poll(self, key: _Key) -> None:
        path = f"{key.path}?wait_for_change=true&timeout_sec={_WAIT_S}"
        answered_at_s = time.monotonic()
        while not self._stopped.is_set():
            asked_at_s = time.monotonic()
            try:
                text = metadata(path, instead=_ALTERNATIVE)
            except (RuntimeError, http.client.HTTPException):
                if time.monotonic() - answered_at_s > _MAX_SILENCE_S:
                    raise
            else:
                answered_at_s = time.monotonic()
                if self._is_alarm(key, text):
                    return
            # Proxies such as GKE's may answer without waiting for a change.
            self._stopped.wait(max(0.0, asked_at_s + _PAUSE_S - time.monotonic()))

    def _is_alarm(self, key: _Key, text: str) -> bool:
        if text.strip() != key.alarm:
            return False
        if not self._stopped.is_set():
            self.hear(
                Notice(
                    source=f"metadata {key.path}",
                    message=key.message,
                    heard_at_s=time.monotonic(),
                    grace_s=key.grace_s,
                )
            )
        return True
