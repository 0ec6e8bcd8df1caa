"""Bandwidths and what the choice loses, against values by hand."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from benchmarks.allreduce.measuring import PEER, Cluster, Figures
from benchmarks.allreduce.report import draw_bandwidths, make_table, peer_ratios
from stratagem.devices.collectives.choice import Algorithm

FIGURES = Figures(
    size_bytes=2**20,
    times_s={"compiler": 0.002, "ring": 0.001, PEER: 0.0008},
    chosen="compiler",
)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """1 MiB in 2 ms are 524 MB/s; each of two sends all of it once, each of four 1.5 times."""
    assert FIGURES.bus_bandwidth("compiler", 2) == pytest.approx(524_288_000)
    assert FIGURES.bus_bandwidth("compiler", 4) == pytest.approx(786_432_000)


def test_choice_is_compared_with_the_best_of_ours_and_with_the_peer() -> None:
    assert FIGURES.loss_of_choice == pytest.approx(1.0)
    assert FIGURES.speed_over_peer == pytest.approx(0.4)
    alone = Figures(4096, {"compiler": 0.001, "ring": 0.002}, "compiler")
    assert alone.loss_of_choice == 0.0
    assert alone.speed_over_peer is None


def test_ratios_are_those_of_what_auto_took() -> None:
    rounds = [{"compiler": 0.002, "ring": 0.001, PEER: 0.0008}, {"compiler": 0.004, PEER: 0.008}]
    one = dataclasses.replace(FIGURES, rounds=rounds)
    alone = Figures(4096, {"compiler": 0.001}, "compiler", [{"compiler": 0.001}])
    (row,) = peer_ratios({Cluster(2): [one, alone]})
    assert (row["case"], row["reference_name"]) == ("1 MiB, 2 processes", PEER)
    assert (row["ratio_min"], row["ratio_max"]) == pytest.approx((0.4, 2.0))


@pytest.mark.slow
def test_table_and_plot_show_every_size(tmp_path) -> None:
    alone = Figures(4096, {one.value: 0.001 for one in Algorithm}, "compiler")
    cluster = Cluster(2, devices_per_process=2)
    assert (cluster.num_replicas, str(cluster)) == (4, "2 processes x 2 devices")
    console = Console(width=150)
    with console.capture() as capture:
        console.print(make_table(Cluster(2), [FIGURES]))
        console.print(make_table(cluster, [alone]))
    text = capture.get()
    assert all(part in text for part in ("1 MiB", "4 KiB", "100%", "0.40", "0.524"))
    draw_bandwidths(tmp_path / "a.png", {Cluster(2): [FIGURES], cluster: [alone]}, "here")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
