"""What users meet on a cluster of two workers, each with one replica."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

import stratagem as sg
from tests.multiprocess.cluster import PROGRAMS, Ended, run_cluster


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Ended], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("behaviour")
    every = run_cluster([str(PROGRAMS / "behaviour.py"), str(folder)], 2)
    for ended in every:
        assert ended.code == 0, ended.errors
    return every, [json.loads((folder / f"process-{i}.json").read_text()) for i in range(2)]


@pytest.fixture(scope="module")
def seen(run: tuple[list[Ended], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return run[1]


def test_host_collectives_bring_objects_to_all(seen) -> None:
    for one in seen:
        assert one["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert one["broadcast"] == ["from", 0]
        assert one["replicas"] == 2
    assert [one["task"] for one in seen] == [["worker", 0], ["worker", 1]]


def test_host_collectives_of_one_process_return_at_once() -> None:
    host = sg.collectives.host
    assert host.all_gather_object(3) == [3]
    assert host.broadcast_object("a") == "a"
    assert host.barrier("here", timeout_s=1.0) is None


def test_files_of_unequal_length_are_read_once_and_all_end_together(seen) -> None:
    """Five files of 5, 9, 2, 1 and 7 examples in batches of 4: worker 1 has the fewer."""
    steps = seen[0]["by file"]
    assert seen[1]["by file"] == steps
    read = sorted(i for step in steps for part in step for i in part)
    assert read == list(range(24))
    assert all(len(step) == 2 for step in steps)
    assert all(sum(map(len, step)) <= 4 for step in steps)
    assert any(not part for part in steps[-1])


def test_batches_that_all_read_are_split(seen) -> None:
    wanted = [[[0, 1, 2], [3, 4]], [[5, 6], [7]]]
    assert [one["by data"] for one in seen] == [wanted] * 2


def test_datasets_of_ones_own_go_on_empty_until_all_have_ended(seen) -> None:
    wanted = [[[0, 1], [10, 11]], [[], [12, 13]], [[], [14, 15]]]
    assert [one["from function"] for one in seen] == [wanted] * 2


def test_constant_model_reports_the_loss_of_one_device(seen) -> None:
    """As TensorFlow's MultiWorkerMirroredStrategy: 2.75 for targets 0 to 7 and the constant 1."""
    for one in seen:
        assert one["fit loss"] == pytest.approx([2.75, 2.75], abs=1e-6)
        assert one["evaluate"] == pytest.approx([2.75, 11.5], abs=1e-6)


def test_results_of_all_metrics_take_one_program(seen) -> None:
    """Keras asks each metric, and each of them has two variables with a part on each process."""
    for one in seen:
        assert one["results"] == pytest.approx({"loss": 2.75, "mse": 11.5}, abs=1e-6)
        assert one["programs of the results"] == 1


def test_results_of_ones_own_take_one_program_too(seen) -> None:
    for one in seen:
        assert one["doubled"] == {"loss": [5.5], "mse": [23.0]}
        assert one["programs of doubled results"] == 1


def test_results_that_are_structures_are_reported_as_by_one_process(seen) -> None:
    """Dicts, dicts in dicts, vectors, pairs and nothing: of metrics and of steps."""
    for one in seen:
        together, alone = one["structured logs"]
        for kind, entries in alone.items():
            for entry, logs in entries.items():
                leaves, structure = jax.tree.flatten(logs)
                got, structure_of_got = jax.tree.flatten(together[kind][entry])
                assert structure_of_got == structure, (kind, entry)
                np.testing.assert_allclose(got, leaves, rtol=1e-5, err_msg=f"{kind}, {entry}")


def test_parts_of_the_data_are_refused_where_each_process_needs_all(seen) -> None:
    names = {
        "fit": "x",
        "weights": "sample_weight",
        "validation": "validation_data[0]",
        "evaluate": "x",
        "predict": "x",
        "dataset": "x[0]",
    }
    assert seen[0]["refused data"] == seen[1]["refused data"]
    for call, message in seen[0]["refused data"].items():
        expected = f"The workers differ in the values of {names.get(call)}: row 0 is another on"
        assert message.startswith(expected) if call in names else message == "", (call, message)


def test_only_process_0_writes_and_shows_progress(run) -> None:
    every, seen = run
    assert [one["wrote"] for one in seen] == [[True, True], [False, True]]
    assert "Epoch 1/2" in every[0].output
    assert "Epoch" not in every[1].output


def test_initial_values_are_those_of_process_0_without_a_seed(seen) -> None:
    for name in ("weights", "weights of NumPy"):
        assert seen[0][name] == seen[1][name]
        assert any(seen[0][name])


def test_a_save_to_a_folder_of_each_worker_returns_what_the_chief_wrote(seen) -> None:
    """As the clean-up of TensorFlow's guides has it; the folders of the others stay empty."""
    assert seen[0]["paths of the guide"] == seen[1]["paths of the guide"]
    for one in seen:
        assert one["paths exist"] == [True, True]
        assert one["restored"]
    assert all("workertemp" not in path for path in seen[1]["paths of the guide"])


def test_a_save_is_of_the_model_even_if_processes_freed_different_ones_of_its_name(seen) -> None:
    assert [one["twin in parts"] for one in seen] == [[True, True]] * 2


def test_values_on_accelerators_are_saved_as_they_were_on_several_processes(seen) -> None:
    assert all(one["is sharded"] for one in seen)
    restored = [one["restored copies"] for one in seen]
    assert all(tables and weights for tables, _, weights in restored)
    assert {sums for _, sums, _ in restored} == {1 + 2}


def test_a_save_behind_training_returns_what_the_chief_writes(seen) -> None:
    paths = [one["path behind training"] for one in seen]
    assert paths[0] == paths[1]
    assert paths[0][1]
    assert "workertemp" not in paths[0][0]


def test_models_that_are_built_after_a_restore_have_its_values_in_each_process(seen) -> None:
    for one in seen:
        assert one["restored when built"] == [True, True]


def test_each_process_gets_its_own_part_of_a_pytree_again(seen) -> None:
    assert [one["pytree"] for one in seen] == [[[1.0, 1.0], 7], [[2.0, 2.0], 7]]
