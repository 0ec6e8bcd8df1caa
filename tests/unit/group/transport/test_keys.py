"""The keys of a cluster."""

from __future__ import annotations

import dataclasses

import pytest

from stratagem.group.transport.keys import ClusterKeys


def test_keys_are_new_each_time_and_come_back_from_text() -> None:
    one, other = ClusterKeys.make(), ClusterKeys.make()
    assert not set(dataclasses.astuple(one)) & set(dataclasses.astuple(other))
    assert ClusterKeys.from_json(one.as_json()) == one


def test_secrets_are_not_shown() -> None:
    keys = ClusterKeys.make()
    for shown in (repr(keys), str(keys), f"{keys}"):
        assert keys.server_secret.decode() not in shown
        assert keys.client_secret.decode() not in shown


@pytest.mark.parametrize("key", [b"short", "x" * 40, None])
def test_what_is_no_key_is_refused_and_not_shown(key) -> None:
    with pytest.raises(ValueError, match=r"client_secret is not a valid key\.") as raised:
        dataclasses.replace(ClusterKeys.make(), client_secret=key)
    assert "short" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"server_public": 1}', '{"other": "key"}', "é"])
def test_what_are_no_keys_are_refused(text) -> None:
    with pytest.raises(ValueError, match="cluster keys cannot be parsed"):
        ClusterKeys.from_json(text)
