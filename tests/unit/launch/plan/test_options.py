"""Options of a launch and their errors."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from stratagem.launch.plan.options import LaunchArguments, LaunchOptions


def test_keyword_arguments_are_the_fields() -> None:
    fields = {field.name for field in dataclasses.fields(LaunchOptions)}
    assert fields == LaunchArguments.__optional_keys__
    hints = typing.get_type_hints(LaunchArguments)
    assert hints == typing.get_type_hints(LaunchOptions)


def test_those_that_lead_come_first() -> None:
    options = LaunchOptions(workers=2, chief=True, ps=1, evaluator=True)
    assert options.task_types == ("chief", "worker", "worker", "ps", "evaluator")
    assert LaunchOptions().task_types == ("worker",)
    assert LaunchOptions(workers=0, chief=True).task_types == ("chief",)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": -1}, "workers=-1 is too small(?s:.)*at least 0"),
        ({"ps": -1}, "ps=-1 is too small"),
        ({"devices_per_worker": 0}, "devices_per_worker=0 is too small(?s:.)*at least 1"),
        ({"max_restarts": -2}, "max_restarts=-2 is too small"),
        ({"workers": 0}, "leaves no task to train"),
        ({"workers": 0, "ps": 3, "evaluator": True}, "leaves no task to train"),
        (
            {"log_level": "loud"},
            "log_level='loud' is not a log level(?s:.)*'debug', 'info'",
        ),
        ({"node_rank": -1}, "node_rank=-1 is too small"),
        ({"nnodes": "4:2"}, "nnodes='4:2' is not a number of nodes"),
        ({"nnodes": 0}, "nnodes=0 is not a number of nodes"),
        ({"node_timeout_s": 0.0}, "node_timeout_s=0.0 is not a valid number of seconds"),
        ({"show": "none"}, "show='none' is not a valid choice(?s:.)*'all', 'leader'"),
        ({"grace_s": -0.5}, "grace_s=-0.5 is not a valid number of seconds"),
        ({"survivors": True, "min_workers": 1}, "survivors=True was passed with min_workers=1"),
        ({"workers": 2, "spares": 1, "ps": 1}, "spares=1 was passed with ps=1"),
        ({"spares": 1, "hosts": "a,b"}, "spares=1 was passed with hosts"),
        ({"input_workers": -1}, "input_workers=-1 is too small"),
        ({"evict_slow": 1.0}, "evict_slow=1.0 is not a valid factor(?s:.)*above 1"),
        ({"evict_slow": float("nan")}, "evict_slow=nan is not a valid factor"),
        ({"evict_after_s": -1.0}, "evict_after_s=-1.0 is not a valid number of seconds"),
        ({"max_evictions": -1}, "max_evictions=-1 is too small"),
        (
            {"evaluator_grace_s": float("nan")},
            "evaluator_grace_s=nan is not a valid number of seconds",
        ),
    ],
)
def test_value_out_of_range_is_refused(given, words) -> None:
    with pytest.raises(ValueError, match=words):
        LaunchOptions(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": True}, "workers=True is of type bool(?s:.)*a whole number"),
        ({"workers": None}, "workers=None is of type NoneType(?s:.)*a whole number"),
        ({"ps": "2"}, "ps='2' is of type str"),
        ({"devices_per_worker": 1.0}, "devices_per_worker=1.0 is of type float"),
        ({"chief": 1}, "chief=1 is of type int(?s:.)*True or False"),
        ({"evaluator": "yes"}, "evaluator='yes' is of type str"),
        ({"grace_s": "10"}, "grace_s='10' is of type str(?s:.)*a number of seconds"),
        ({"evict_slow": "2"}, "evict_slow='2' is of type str(?s:.)*a number above 1"),
        ({"node_rank": "1"}, "node_rank='1' is of type str"),
        ({"nnodes": 2.0}, "nnodes=2.0 is of type float(?s:.)*a number, or"),
        ({"rdzv_endpoint": 29400}, "rdzv_endpoint=29400 is of type int(?s:.)*HOST:PORT"),
        ({"hosts": 2}, "hosts=2 is of type int(?s:.)*names of hosts"),
        ({"hostfile": 2}, "hostfile=2 is of type int(?s:.)*a path"),
        ({"ssh_options": ["-p"]}, r"ssh_options=\['-p'\] is of type list"),
        ({"env": "A=1"}, "env='A=1' is of type str(?s:.)*a list"),
        ({"log_dir": 3}, "log_dir=3 is of type int(?s:.)*a path, or None for no files"),
    ],
)
def test_value_of_another_type_is_refused(given, words) -> None:
    with pytest.raises(TypeError, match=words):
        LaunchOptions(**given)
