"""Notices from a fake metadata server of Google Cloud."""

from __future__ import annotations

import http.server
import threading
import urllib.error
import urllib.parse
from collections.abc import Iterator

import pytest

from stratagem.cluster.preemption import configuration as google_cloud
from stratagem.cluster.preemption.configuration import GoogleCloudSource, on_google_cloud

TIMEOUT_S = 60
PREEMPTED = "instance/preempted"
MAINTENANCE = "instance/maintenance-event"


class MetadataServer:
    """Answers a request at once, or with `wait_for_change` on a change of its value."""

    def __init__(self) -> None:
        self.values = {PREEMPTED: "FALSE", MAINTENANCE: "NONE"}
        self.requests: list[tuple[str, bool]] = []
        self.num_failing = 0
        self.waits = True
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def let_go(self) -> None:
        with self.changed:
            self.waits = False
            self.changed.notify_all()

    def wait_for_requests(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.requests) >= number, TIMEOUT_S)

    def answer(self, address: str, flavor: str | None) -> tuple[int, str]:
        url = urllib.parse.urlsplit(address)
        key = url.path.removeprefix("/computeMetadata/v1/")
        query = urllib.parse.parse_qs(url.query)
        waits = query.get("wait_for_change") == ["true"]
        with self.changed:
            self.requests.append((key, waits))
            self.changed.notify_all()
            if flavor != "Google" or key not in self.values:
                return 403, ""
            if waits and self.num_failing:
                self.num_failing -= 1
                return 503, ""
            before = self.values[key]
            if waits:
                limit_s = float(query["timeout_sec"][0])
                self.changed.wait_for(lambda: self.values[key] != before or not self.waits, limit_s)
            return 200, self.values[key]


@pytest.fixture
def metadata_server(monkeypatch) -> Iterator[MetadataServer]:
    answers = MetadataServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers.answer(self.path, self.headers["Metadata-Flavor"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(f"{text}\n".encode())

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(google_cloud, "_PAUSE_S", 0.001)
    yield answers
    answers.let_go()
    join_watchers()
    server.shutdown()
    thread.join()
    server.server_close()


def join_watchers() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("stratagem-notice"):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("key", "value", "grace_s", "words"),
    [
        (PREEMPTED, "TRUE", 30.0, "preempts this Spot VM"),
        (MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE", None, "for maintenance of its host"),
    ],
)
def test_change_is_heard(metadata_server, key, value, grace_s, words) -> None:
    with GoogleCloudSource() as source:
        metadata_server.wait_for_requests(4)
        assert source.notice is None
        metadata_server.set(key, value)
        notice = source.wait(timeout_s=TIMEOUT_S)
    assert notice is not None
    assert (notice.source, notice.grace_s) == (f"metadata {key}", grace_s)
    assert words in notice.message
    assert metadata_server.requests[:2] == [(PREEMPTED, False), (MAINTENANCE, False)]
    assert all(waits for _, waits in metadata_server.requests[2:])


def test_alarm_at_start_is_a_notice(metadata_server) -> None:
    metadata_server.set(PREEMPTED, "TRUE")
    with GoogleCloudSource() as source:
        assert source.notice is not None
        assert source.notice.source == f"metadata {PREEMPTED}"


def test_live_migration_is_no_notice(metadata_server) -> None:
    with GoogleCloudSource() as source:
        metadata_server.wait_for_requests(4)
        metadata_server.set(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
        metadata_server.wait_for_requests(5)
        assert source.notice is None
        metadata_server.set(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
        assert source.wait(timeout_s=TIMEOUT_S) is not None
        metadata_server.set(PREEMPTED, "TRUE")
        while len(source.notices) < 2:
            metadata_server.let_go()
    assert [notice.grace_s for notice in source.notices] == [None, 30.0]


def test_server_that_fails_now_and_then_is_asked_again(metadata_server) -> None:
    metadata_server.num_failing = 4
    with GoogleCloudSource() as source:
        metadata_server.wait_for_requests(8)
        metadata_server.set(PREEMPTED, "TRUE")
        assert source.wait(timeout_s=TIMEOUT_S) is not None


def test_server_that_stays_silent_is_an_error(metadata_server, monkeypatch) -> None:
    monkeypatch.setattr(google_cloud, "_MAX_SILENCE_S", 0.0)
    metadata_server.num_failing = 1000
    with (
        GoogleCloudSource() as source,
        pytest.raises(
            RuntimeError, match=r"did not return 'instance/\S+': HTTP Error 503"
        ) as error,
    ):
        source.wait(timeout_s=TIMEOUT_S)
    # The source keeps the error, which must not keep a connection.
    assert isinstance(error.value.__cause__, urllib.error.HTTPError)
    assert error.value.__cause__.closed


def test_server_that_does_not_wait_is_not_asked_without_a_pause(
    metadata_server, monkeypatch
) -> None:
    monkeypatch.setattr(google_cloud, "_PAUSE_S", 3600.0)
    metadata_server.waits = False
    source = GoogleCloudSource()
    source.start()
    metadata_server.wait_for_requests(4)
    source.stop()
    join_watchers()
    assert len(metadata_server.requests) == 4


def test_change_after_the_end_is_not_heard(metadata_server) -> None:
    with GoogleCloudSource() as source:
        metadata_server.wait_for_requests(4)
    metadata_server.set(PREEMPTED, "TRUE")
    metadata_server.set(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
    join_watchers()
    assert source.notice is None


def test_machine_elsewhere_cannot_listen(monkeypatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    source = GoogleCloudSource()
    with pytest.raises(
        RuntimeError,
        match=r"did not return 'instance/preempted'(?s:.)*with a termination_watcher_fn",
    ):
        source.start()
    assert source.notice is None


@pytest.mark.parametrize(
    ("product", "expected"), [("Google Compute Engine\n", True), ("KVM\n", False), (None, False)]
)
def test_machine_is_known_by_its_firmware(tmp_path, monkeypatch, product, expected) -> None:
    path = tmp_path / "product_name"
    if product is not None:
        path.write_text(product)
    monkeypatch.setattr(google_cloud, "_PRODUCT_NAME", path)
    assert on_google_cloud() is expected


@pytest.mark.parametrize("name", ["GCE_METADATA_HOST", "GCE_METADATA_IP"])
def test_machine_is_known_by_the_address_of_the_server(monkeypatch, name) -> None:
    assert not on_google_cloud()
    monkeypatch.setenv(name, "169.254.169.254")
    assert on_google_cloud()
