"""Hosts, flags and variables of a launch by SSH."""

from __future__ import annotations

import pytest

from stratagem.launch.plan.options import (
    Host,
    LaunchOptions,
    read_hosts,
    remote_flags,
    remote_variables,
)


@pytest.mark.parametrize("hosts", ["a, b,me@c", ["a", "b", "me@c"], ("a", "b", "me@c")])
def test_hosts_are_a_list_or_text(hosts) -> None:
    assert read_hosts(LaunchOptions(hosts=hosts)) == [Host("a"), Host("b"), Host("me@c")]


def test_file_has_a_host_a_line_with_slots_and_comments(tmp_path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the rack\na slots=2\n\nb  # no slots\nme@10.0.0.3 slots = 4\n")
    hosts = read_hosts(LaunchOptions(hostfile=path))
    assert hosts == [Host("a", 2), Host("b"), Host("me@10.0.0.3", 4)]
    assert read_hosts(LaunchOptions()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a slots=x", "has the line 'a slots=x'(?s:.)*slots=N"),
        ("a b", "has the line 'a b'"),
        ("a\na", r"The hosts are \['a', 'a'\](?s:.)*each once"),
        ("# none", r"The hosts are \[\](?s:.)*at least one host"),
        ("-oProxyCommand=x", "The hosts are"),
    ],
)
def test_file_that_is_malformed_is_refused(tmp_path, text, words) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_hosts(LaunchOptions(hostfile=path))


def test_list_that_is_malformed_is_refused(tmp_path) -> None:
    for hosts in ("", "a,,b", "a,a", "-v"):
        with pytest.raises(ValueError, match="The hosts are"):
            read_hosts(LaunchOptions(hosts=hosts))
    with pytest.raises(ValueError, match="are both given"):
        read_hosts(LaunchOptions(hosts="a", hostfile=tmp_path))


def test_launchers_of_hosts_get_the_options_as_flags() -> None:
    options = LaunchOptions(
        workers=3, hosts="a,b", max_restarts=2, chief=True, show="leader", env=("A=1",)
    )
    common = ["--chief", "--max-restarts", "2", "--show", "leader"]
    flags = remote_flags(options, Host("b"), rank=1, endpoint="a:1")
    own = ["--workers", "3", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "a:1"]
    assert flags == [*own, *common]
    flags = remote_flags(options, Host("a", 8), rank=0, endpoint="a:1")
    assert flags[:6] == ["--workers", "8", "--nnodes", "2", "--node-rank", "0"]


def test_settings_and_chosen_variables_are_forwarded() -> None:
    base = {
        "HOME": "/home/me",
        "TOKEN": "3",
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "XLA_FLAGS": "--x",
        "STRATAGEM_PEER_TIMEOUT_S": "9",
        # The launcher's own, which are flags there.
        "STRATAGEM_HOSTS": "a,b",
        "STRATAGEM_WORKERS": "2",
        "STRATAGEM_CONFIG": "launch.toml",
    }
    assert remote_variables(LaunchOptions(env=("TOKEN", "A=b=c", "E=")), base) == {
        "TOKEN": "3",
        "A": "b=c",
        "E": "",
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "XLA_FLAGS": "--x",
        "STRATAGEM_PEER_TIMEOUT_S": "9",
    }
    for one in ("MISSING", "=1"):
        with pytest.raises(ValueError, match=r"has no value(?s:.)*NAME=VALUE"):
            remote_variables(LaunchOptions(env=(one,)), base)
