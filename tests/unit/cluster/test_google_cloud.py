"""Google Cloud's clients, and the metadata server of its machines."""

from __future__ import annotations

import sys
import types

import pytest

from stratagem.cluster import google_cloud


@pytest.mark.usefixtures("metadata_server")
def test_metadata_server_is_asked() -> None:
    assert google_cloud.metadata("project/project-id", instead="project=") == "my-project"


@pytest.mark.usefixtures("metadata_server")
def test_answer_that_is_missing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"did not return 'instance/x'(?s:.)*pass zone="):
        google_cloud.metadata("instance/x", instead="zone=")


def test_machine_elsewhere_has_no_metadata_server(variables) -> None:
    variables(GCE_METADATA_IP="127.0.0.1:1")
    with pytest.raises(RuntimeError, match=r"metadata server 127.0.0.1:1 did not return"):
        google_cloud.metadata("project/project-id", instead="project=")


@pytest.fixture
def libraries(monkeypatch) -> list[tuple]:
    """A fake of Google's libraries that records how the client is built."""
    calls: list[tuple] = []

    def default(scopes) -> tuple[str, str]:
        calls.append(("default", *scopes))
        return "own credentials", "project"

    def build(api, version, **options) -> str:
        calls.append((api, version, options))
        return "client"

    discovery = types.ModuleType("googleapiclient.discovery")
    discovery.__dict__["build"] = build
    auth = types.ModuleType("google.auth")
    auth.__dict__["default"] = default
    for name, module in {
        "googleapiclient": types.ModuleType("googleapiclient"),
        "googleapiclient.discovery": discovery,
        "google.auth": auth,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_client_is_built_with_the_machine_s_credentials(libraries) -> None:
    assert google_cloud.build_service("compute", "default", needed_by="a test") == "client"
    assert libraries == [
        ("default", "https://www.googleapis.com/auth/cloud-platform"),
        ("compute", "v1", {"credentials": "own credentials", "cache_discovery": False}),
    ]


def test_client_is_built_with_given_credentials_and_address(libraries) -> None:
    google_cloud.build_service("tpu", "mine", needed_by="a test", discovery_url="https://x")
    ((api, version, options),) = libraries
    assert (api, version) == ("tpu", "v1")
    assert options == {
        "credentials": "mine",
        "cache_discovery": False,
        "discoveryServiceUrl": "https://x",
    }


def test_libraries_that_are_missing_are_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with pytest.raises(
        ImportError,
        match=r"GCEClusterResolver needs googleapiclient.discovery, which cannot be imported"
        r"(?s:.)*pip install google-api-python-client google-auth",
    ):
        google_cloud.build_service("compute", "default", needed_by="GCEClusterResolver")
