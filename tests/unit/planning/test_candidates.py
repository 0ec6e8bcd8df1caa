"""Candidates: which there are, and that their code builds their strategy."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.devices.abstract_devices import planning_for
from stratagem.planning.candidates import Form, PlanCandidate, list_candidates
from stratagem.planning.targets import parse_target

_TARGET = parse_target("8xH100")


def _candidates(batch: int = 64, sizes=(1, 2)) -> list[PlanCandidate]:
    forms = [Form(), Form("full", "mixed_bfloat16")]
    return list_candidates(_TARGET, batch, forms, strategy="MirroredStrategy", model_sizes=sizes)


def test_all_meshes_fill_the_machine_once() -> None:
    found = _candidates()
    assert len(found) == len(set(found)) == 2 * (1 + 2 * 3 + 1 + 2 * 2)
    for one in found:
        copies, shards, size = one.mesh
        assert copies * shards * size == 8


def test_a_batch_smaller_than_the_machine_needs_replicas_of_several_devices() -> None:
    assert {one.devices_per_replica for one in _candidates(batch=4)} == {2}
    assert not _candidates(batch=3)


@pytest.mark.parametrize("candidate", _candidates(), ids=lambda one: one.code)
def test_code_builds_the_strategy(candidate) -> None:
    namespace = {"sg": sg, "layout_map": {".*kernel": (None, "logical")}}
    lines = [one for one in candidate.code.split("; ") if one.startswith("strategy")]
    with planning_for(_TARGET.topology):
        exec(lines[0], namespace)
    topology = namespace["strategy"].topology
    assert topology.num_replicas == candidate.num_replicas
    assert topology.num_logical_devices == candidate.devices_per_replica
    if candidate.shard_state:
        assert topology.num_shards == candidate.shard_size
        assert namespace["strategy"].placement.shard_state == candidate.shard_state


def test_code_sets_precision_before_the_strategy_and_remat_after_the_model() -> None:
    code = _candidates()[-1].code
    first, second, third = code.split("; ")
    assert first == 'keras.config.set_dtype_policy("mixed_bfloat16")'
    assert second.startswith("strategy = sg.MirroredStrategy(")
    assert third == 'sg.remat(model, "full")'
