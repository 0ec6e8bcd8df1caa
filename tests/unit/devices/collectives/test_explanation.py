"""Output of `sg.collectives.explain`."""

from __future__ import annotations

import stratagem as sg
from stratagem.devices.collectives.choice import Algorithm, choose
from stratagem.devices.collectives.measurement import MeasuredChoice
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.strategies.base.automatic import AutomaticOps
from stratagem.strategies.base.strategy import Strategy

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


def test_measured_times_and_the_rule_made_of_them(capsys) -> None:
    times_s = {
        Algorithm.COMPILER: {2**12: 0.002, 2**22: 0.01},
        Algorithm.RING: {2**12: 0.0005, 2**22: 0.02},
    }
    measured = MeasuredChoice(choose(times_s), times_s, "cached by process 0")
    options = sg.CommunicationOptions(reduction_dtype="bfloat16")
    topology = Topology(find_devices(FOUR[:1]))
    shown = lines(capsys, Strategy(topology, AutomaticOps(options, measured)))
    assert shown[0] == "1 replica on 1 process, cpu"
    assert shown[1] == "algorithm: ring up to 406.4 KiB, compiler above"
    assert shown[3].startswith("float32 gradients: sent as bfloat16")
    assert shown[4] == "Milliseconds per float32 sum, cached by process 0:"
    assert shown[5].split() == ["4", "KiB", "4", "MiB"]
    assert [line.split() for line in shown[6:]] == [
        ["compiler", "2.000", "10.000"],
        ["ring", "0.500", "20.000"],
    ]


def test_option_names_the_algorithm_whatever_was_measured(capsys) -> None:
    for name, expected in [
        ("RING", "ring"),
        ("HIERARCHICAL", "hierarchical"),
        ("NCCL", "compiler"),
    ]:
        options = sg.CommunicationOptions(implementation=name)
        strategy = sg.MultiWorkerMirroredStrategy(communication_options=options)
        assert lines(capsys, strategy)[1] == f"algorithm: {expected}"
