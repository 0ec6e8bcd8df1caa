"""A Ray cluster that answers, is of another version, or is away; caches that are stale."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.cli.doctor import examination as services
from stratagem.cli.doctor.settings import Level

_TOKEN = "0123"


@pytest.fixture
def dashboard() -> Iterator[str]:
    """A server that answers as the dashboard of Ray 2.59.0 does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            token = self.headers.get("Authorization", "")
            is_known = self.path == "/api/version" and token in ("", f"Bearer {_TOKEN}")
            self.send_response(200 if is_known else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"ray_version": "2.59.0"}).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Writes nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_no_ray_cluster_is_fine() -> None:
    assert services.check_ray({}, {}) == []
    assert services.check_ray({"RAY_ADDRESS": "auto"}, {"ray": "2.60.0"}) == []


@pytest.mark.parametrize(
    ("version", "level"), [("2.59.0", Level.OK), ("2.60.0", Level.ERROR)], ids=["same", "other"]
)
def test_version_of_the_cluster_is_compared(version: str, level: Level, dashboard: str) -> None:
    (finding,) = services.check_ray(
        {"RAY_API_SERVER_ADDRESS": dashboard, "RAY_AUTH_TOKEN": _TOKEN}, {"ray": version}
    )
    assert finding.level is level
    assert "2.59.0" in finding.text
    assert level is Level.OK or finding.fix == 'pip install "ray[default]==2.59.0"'


def test_ray_that_is_not_installed_is_an_error(dashboard: str) -> None:
    (finding,) = services.check_ray({"RAY_API_SERVER_ADDRESS": dashboard}, {})
    assert finding.fix == "pip install 'stratagem[ray]'"


def test_address_of_a_file_is_refused(tmp_path: Path) -> None:
    address = f"file://{tmp_path}"
    (finding,) = services.check_ray({"RAY_API_SERVER_ADDRESS": address}, {"ray": "2.60"})
    assert finding.level is Level.ERROR
    assert address in finding.text
    assert finding.fix == "RAY_API_SERVER_ADDRESS=http://HOST:8265"


def test_token_is_sent_and_a_wrong_one_is_named(dashboard: str, tmp_path: Path) -> None:
    address = {"RAY_API_SERVER_ADDRESS": dashboard}
    (tmp_path / "token").write_text(f"{_TOKEN}\n")
    for given in ({"RAY_AUTH_TOKEN": _TOKEN}, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}):
        (finding,) = services.check_ray({**address, **given}, {"ray": "2.59.0"})
        assert finding.level is Level.OK
    (finding,) = services.check_ray({**address, "RAY_AUTH_TOKEN": "x"}, {"ray": "2.59.0"})
    assert finding.level is Level.ERROR
    assert finding.text.endswith("refuses the token of this machine.")
    assert "RAY_AUTH_TOKEN" in finding.fix


def test_missing_token_is_named(dashboard: str, tmp_path: Path) -> None:
    variables = {
        "RAY_API_SERVER_ADDRESS": f"{dashboard}/elsewhere",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing"),
    }
    (finding,) = services.check_ray(variables, {"ray": "2.59.0"})
    assert finding.text.endswith("wants a token, and this machine has none.")


def test_dashboard_that_does_not_answer_is_a_warning() -> None:
    (finding,) = services.check_ray({"RAY_ADDRESS": "ray://127.0.0.1:1"}, {"ray": "2"}, limit_s=1)
    assert finding.level is Level.WARNING
    assert "http://127.0.0.1:8265" in finding.text


def test_cache_in_use_is_fine(tmp_path: Path) -> None:
    assert services.check_cache(tmp_path / "missing") == []
    (tmp_path / "program").write_bytes(b"x")
    assert services.check_cache(tmp_path) == []


def test_large_cache_is_named(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("wb") as file:
        file.truncate(21 * 2**30)  # takes no space
    (finding,) = services.check_cache(tmp_path)
    assert finding.text == f"{tmp_path} holds 21 GiB."
    assert "journals/" in finding.fix


def test_cache_folder_that_is_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (finding,) = services.check_cache(tmp_path / "file" / "cache")
    assert f"STRATAGEM_CACHE_DIR cannot be written: {tmp_path / 'file'} is a file" in finding.text
    assert "set STRATAGEM_CACHE_DIR to a folder" in finding.fix


@pytest.mark.parametrize(
    ("installed_after_s", "level"), [(-1.0, Level.OK), (1.0, Level.WARNING), (None, Level.OK)]
)
def test_programs_of_another_jaxlib_are_stale(
    installed_after_s: float | None, level: Level, tmp_path: Path
) -> None:
    (tmp_path / "jit_f-1a-cache").write_bytes(b"x")
    (tmp_path / "jit_f-1a-atime").write_bytes(b"x")
    written_s = (tmp_path / "jit_f-1a-cache").stat().st_mtime
    installed_s = None if installed_after_s is None else written_s + installed_after_s
    (finding,) = services.check_compilation_cache(tmp_path, "0.10.2", installed_s, None)
    assert finding.level is level
    assert finding.text.count(str(tmp_path)) == 1
    if level is Level.WARNING:
        assert "older than jaxlib 0.10.2" in finding.text
        assert finding.fix.startswith(f"rm -r {tmp_path}")


def test_empty_compilation_cache_is_fine(tmp_path: Path) -> None:
    assert services.check_compilation_cache(tmp_path / "new", "0.10.2", 0.0, None) == []


def test_one_finding_for_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The folder of compiled programs is inside the other one."""
    (tmp_path / "cache").write_text("a file is in its place")
    programs, variable = tmp_path / "cache" / "programs", "JAX_COMPILATION_CACHE_DIR"
    assert len(services.check_cache(tmp_path / "cache")) == 1
    assert services.check_compilation_cache(programs, "0.10.2", 0.0, None) == []
    (finding,) = services.check_compilation_cache(programs, "0.10.2", 0.0, variable)
    assert f"{variable} cannot be written" in finding.text
