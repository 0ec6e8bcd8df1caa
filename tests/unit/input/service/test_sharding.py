"""Sharding policies: TensorFlow's names and numbers."""

from __future__ import annotations

import pytest

from stratagem.input.service.splits import ShardingPolicy, checked_policy


def test_policies_by_name_and_value() -> None:
    assert checked_policy("parallel_epochs") is ShardingPolicy.OFF
    assert checked_policy("distributed_epoch") is ShardingPolicy.DYNAMIC
    assert all(checked_policy(policy) is policy for policy in ShardingPolicy)
    static = [policy.name for policy in ShardingPolicy if policy.is_static]
    assert static == ["FILE", "DATA", "FILE_OR_DATA", "HINT"]


@pytest.mark.parametrize("mode", ["dynamic", 1, None])
def test_other_values_are_refused(mode) -> None:
    with pytest.raises(ValueError, match="is no sharding policy"):
        checked_policy(mode)
