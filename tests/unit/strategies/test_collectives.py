"""Output of `sg.collectives.explain`."""

from __future__ import annotations

import stratagem as sg
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.strategies.cross_device_ops import AutomaticOps
from stratagem.strategies.strategy import Strategy

FOUR = [f"cpu:{index}" for index in range(4)]


def lines(capsys, strategy) -> list[str]:
    sg.collectives.explain(strategy)
    return capsys.readouterr().out.splitlines()


def test_named_algorithm_and_its_packs(capsys) -> None:
    strategy = sg.MirroredStrategy(FOUR, cross_device_ops=sg.RingAllReduce(num_packs=2))
    assert lines(capsys, strategy)[:3] == [
        "4 replicas on 1 process, cpu",
        "algorithm: ring",
        "gradients: in 2 packs",
    ]
    unpacked = sg.MirroredStrategy(FOUR, cross_device_ops=sg.HierarchicalCopyAllReduce(0))
    assert "not packed" in lines(capsys, unpacked)[2]


def test_function_of_the_user(capsys) -> None:
    ops = sg.ReductionToOneDevice(accumulation_fn=sum)
    shown = lines(capsys, sg.MirroredStrategy(FOUR, cross_device_ops=ops))
    assert shown[1:] == ["algorithm: custom function of the values of all replicas"]


def test_rule_between_processes_and_what_is_sent(capsys, monkeypatch) -> None:
    monkeypatch.setattr(Topology, "spans_processes", True)
    options = sg.CommunicationOptions(reduction_dtype="bfloat16")
    ops = AutomaticOps(options, between_processes=True)
    shown = lines(capsys, Strategy(Topology(find_devices(FOUR)), ops))
    assert shown[1:] == [
        "algorithm: to one device up to 256.0 KiB, compiler above",
        "gradients: in packs of 256.0 KiB",
        "float32 gradients: sent as bfloat16, by a separate algorithm",
    ]
    of_others = Strategy(Topology(find_devices(FOUR)), AutomaticOps())
    assert lines(capsys, of_others)[1] == "algorithm: compiler"


def test_option_names_the_algorithm(capsys) -> None:
    for name, expected in [
        ("RING", "ring"),
        ("HIERARCHICAL", "hierarchical"),
        ("NCCL", "compiler"),
    ]:
        options = sg.CommunicationOptions(implementation=name)
        strategy = sg.MultiWorkerMirroredStrategy(communication_options=options)
        assert lines(capsys, strategy)[1] == f"algorithm: {expected}"
