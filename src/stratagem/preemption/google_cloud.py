"""Notices of Google Cloud, which the metadata server of each machine gives."""

from __future__ import annotations

import dataclasses
import http.client
import threading
import time
import urllib.error
from pathlib import Path

from stratagem import environment
from stratagem.cluster.google_cloud import metadata
from stratagem.preemption.notices import Notice, NoticeSource

__all__ = ["GoogleCloudSource", "on_google_cloud"]

# The server answers at once when a value changes, and after so long in any case. That also bounds
# how late a change is seen that comes between two requests, and how long a thread lives on after
# `stop`. It has to be less than the time limit in `metadata`.
_WAIT_S = 5
_PAUSE_S = 1.0
# The server is on the same host, but does not answer now and then.
_MAX_SILENCE_S = 60.0
_INSTEAD = "a TerminationConfig with sources or with a termination_watcher_fn"
_PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")


@dataclasses.dataclass(frozen=True)
class _Key:
    """A value of the metadata server: what it is when there is notice, and what that means."""

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
    """Returns whether this is a machine of Google Cloud, without asking over the network.

    Returns:
        True where the firmware says so, or `GCE_METADATA_HOST` or `GCE_METADATA_IP` is set.
    """
    if environment.lookup("GCE_METADATA_HOST") or environment.lookup("GCE_METADATA_IP"):
        return True
    try:
        return _PRODUCT_NAME.read_text().startswith("Google")
    except OSError:
        return False


class GoogleCloudSource(NoticeSource):
    """Hears from the metadata server that a VM is preempted, or stopped for maintenance.

    A Spot VM has 30 seconds then. Before maintenance it is an hour for VMs with GPUs and a minute
    for others, which the server does not tell. A VM that is only moved to another host
    gives no notice. An error comes out of `notice` and `wait` when the server is silent for a
    minute.

    Source: TF 2.21 failure_handling_util.py, termination_watcher_function_gce; Google Cloud's
    pages "Query metadata server for maintenance event notices" and "Create and use Spot VMs".
    """

    def __init__(self) -> None:
        super().__init__()
        self._stopped = threading.Event()

    def _listen(self) -> None:
        texts = [_ask(key.path) for key in _KEYS]
        for key, text in zip(_KEYS, texts, strict=True):
            if self._is_alarm(key, text):
                continue
            name = f"stratagem-notice-{key.path.rpartition('/')[2]}"
            threading.Thread(target=self._watch, args=(key,), name=name, daemon=True).start()

    def _end(self) -> None:
        self._stopped.set()

    def _watch(self, key: _Key) -> None:
        try:
            self._follow(key)
        except Exception as error:  # noqa: BLE001 - raised by `notice`, in the thread that looks
            self.fail(error)

    def _follow(self, key: _Key) -> None:
        path = f"{key.path}?wait_for_change=true&timeout_sec={_WAIT_S}"
        answered_at_s = time.monotonic()
        while not self._stopped.is_set():
            asked_at_s = time.monotonic()
            try:
                text = _ask(path)
            except (RuntimeError, http.client.HTTPException):
                if time.monotonic() - answered_at_s > _MAX_SILENCE_S:
                    raise
            else:
                answered_at_s = time.monotonic()
                if self._is_alarm(key, text):
                    return
            # Servers in the middle, such as GKE's, may answer without waiting for a change.
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


def _ask(path: str) -> str:
    try:
        return metadata(path, instead=_INSTEAD)
    except RuntimeError as error:
        # An answer that is an error holds its connection, and the source may hold the error.
        if isinstance(error.__cause__, urllib.error.HTTPError):
            error.__cause__.close()
        raise
