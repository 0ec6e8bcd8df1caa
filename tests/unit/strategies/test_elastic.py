"""`ElasticStrategy` in one process, and its refusals; clusters are in tests/multiprocess."""

from __future__ import annotations

import contextlib
import json
from typing import NoReturn

import numpy as np
import pytest

import stratagem as sg
from stratagem.devices import finding as separate_processes
from stratagem.errors import NOT_NEEDED
from stratagem.execution.programs import elastic_lockstep
from stratagem.group.elastic.views import not_admitted
from stratagem.strategies import elastic as elastic_members


def test_without_a_cluster_it_is_one_device() -> None:
    strategy = sg.ElasticStrategy()
    assert strategy.num_replicas_in_sync == 1
    assert strategy.members == strategy.participants == (0,)
    with strategy.scope():
        scale = sg.Variable(2.0)
    assert float(strategy.run(lambda x: x * scale, args=(np.float32(3),))) == 6.0


def test_a_resolver_of_another_type_is_refused() -> None:
    resolver: object = "worker"
    with pytest.raises(ValueError, match="cluster_resolver='worker' is of type str"):
        sg.ElasticStrategy(resolver)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (-1, ValueError, "num_backup_workers=-1 is out of range"),
        (1.0, TypeError, "num_backup_workers=1.0 is of type float"),
        (True, TypeError, "num_backup_workers=True is of type bool"),
    ],
)
def test_numbers_of_backup_workers_that_no_cluster_has_are_refused(number, kind, words) -> None:
    with pytest.raises(kind, match=words):
        sg.ElasticStrategy(num_backup_workers=number)


def test_backup_workers_leave_one_to_make_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_cluster(monkeypatch)
    with pytest.raises(ValueError, match="num_backup_workers=2 of 2 workers is out of range"):
        sg.ElasticStrategy(num_backup_workers=2)


def test_backup_workers_and_spares_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_cluster(monkeypatch)
    monkeypatch.setenv("STRATAGEM_NUM_SPARES", "1")
    with pytest.raises(ValueError, match="num_backup_workers is 1, and STRATAGEM_NUM_SPARES is 1"):
        sg.ElasticStrategy(num_backup_workers=1)


def test_a_process_that_is_not_admitted_ends_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise not_admitted("worker 1", 1, 1)

    _set_cluster(monkeypatch)
    monkeypatch.setattr(elastic_members, "ElasticGroup", refuse)
    with pytest.raises(SystemExit) as ended:
        sg.ElasticStrategy(num_backup_workers=1)
    assert ended.value.code == NOT_NEEDED
    assert "while the others train with num_backup_workers=1" in capsys.readouterr().err


def test_a_process_alone_has_no_backup_workers() -> None:
    strategy = sg.ElasticStrategy(num_backup_workers=1)
    assert strategy.num_replicas_in_sync == 1


def test_another_constant_batch_is_refused() -> None:
    batch: object = "both"
    with pytest.raises(ValueError, match="constant_batch='both' was passed"):
        sg.ElasticStrategy(constant_batch=batch)  # pyright: ignore[reportArgumentType]


def _set_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


def test_a_cluster_of_spares_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_cluster(monkeypatch)
    monkeypatch.setenv("STRATAGEM_NUM_SPARES", "2")
    with pytest.raises(ValueError, match="STRATAGEM_NUM_SPARES is 2, but the cluster has 2"):
        sg.ElasticStrategy()


def test_tls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_cluster(monkeypatch)
    found = elastic_members.Credentials(None, certificates=object())  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(elastic_members.Credentials, "find", lambda *args, **kwargs: found)
    with pytest.raises(ValueError, match="STRATAGEM_TLS_DIR is set"):
        sg.ElasticStrategy()


def test_a_cluster_without_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.strategies.membership._labels", lambda *args: None)
    _set_cluster(monkeypatch)
    with pytest.raises(ValueError, match="does not list the address of every process"):
        sg.ElasticStrategy()


def test_several_devices_of_a_process_are_refused() -> None:
    with pytest.raises(RuntimeError, match="This process has 2 devices: cpu:0, cpu:1"):
        separate_processes.check_device(["cpu:0", "cpu:1"])


@pytest.mark.parametrize(
    ("platforms", "gpus", "has_plugin", "words"),
    [
        ("cuda,cpu", (), False, "JAX_PLATFORMS is 'cuda,cpu'"),
        (None, ("0", "1"), True, "this host's GPUs: 0, 1"),
        (None, ("0", "1"), False, ""),
        (None, (), True, ""),
        ("cpu", ("0",), True, ""),
    ],
)
def test_gpus_are_refused_before_jax_waits_for_those_of_others(
    monkeypatch, platforms, gpus, has_plugin, words
) -> None:
    monkeypatch.setattr(separate_processes, "local_gpus", lambda: gpus)
    monkeypatch.setattr(separate_processes, "_has_gpu_plugin", lambda: has_plugin)
    expected = pytest.raises(RuntimeError, match=words) if words else contextlib.nullcontext()
    with expected:
        separate_processes.check_platform(platforms)


@pytest.mark.parametrize(("is_eager", "words"), [(True, "op by op"), (False, "sg.function")])
def test_steps_that_cannot_run_again_are_refused(monkeypatch, is_eager, words) -> None:
    monkeypatch.setattr(sg.config, "runs_eagerly", lambda: is_eager)
    trace = None if is_eager else object()
    monkeypatch.setattr(elastic_lockstep, "current_function_trace", lambda: trace)
    strategy = sg.ElasticStrategy()
    executor = elastic_lockstep.ElasticLockstep(strategy)
    with pytest.raises(NotImplementedError, match=f"was called .*{words}"):
        executor.run(lambda: 1, (), {})


def test_datasets_that_members_read_apart_are_refused(monkeypatch) -> None:
    strategy = sg.ElasticStrategy()
    monkeypatch.setattr(strategy, "executor", elastic_lockstep.ElasticLockstep(strategy))
    with pytest.raises(NotImplementedError, match="was called on an ElasticStrategy"):
        strategy.distribute_datasets_from_function(lambda context: [np.arange(2)])


def test_datasets_of_members_have_whole_batches(monkeypatch) -> None:
    strategy = sg.ElasticStrategy()
    monkeypatch.setattr(strategy, "executor", elastic_lockstep.ElasticLockstep(strategy))
    dataset = strategy.distribute_dataset([np.arange(4), np.arange(3)])
    assert [np.asarray(batch).tolist() for batch in dataset] == [[0, 1, 2, 3], [0, 1, 2]]
    batches = iter(dataset)
    next(batches)
    again = iter(dataset)
    again.set_state(batches.get_state())
    assert np.asarray(next(again)).tolist() == [0, 1, 2]
