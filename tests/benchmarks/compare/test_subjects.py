"""Questions and answers of each kind of work."""

from __future__ import annotations

import pytest

from benchmarks.allreduce.measuring import Cluster
from benchmarks.compare.command import NAMES, subjects_of
from benchmarks.compare.subjects import ServerSubject, SumSubject
from benchmarks.parameter_server.cases import CASES


def test_each_benchmark_has_subjects() -> None:
    for name in NAMES:
        subjects = subjects_of((name,))
        cases = [case for subject in subjects for case in subject.cases]
        assert cases, name
        assert len({*cases}) == len(cases)
    assert subjects_of(NAMES, "no such case") == []


def test_server_cases_share_a_cluster() -> None:
    subjects = subjects_of(("parameter_server",))
    assert sum(len(subject.cases) for subject in subjects) == len(CASES)
    for subject in subjects:
        assert isinstance(subject, ServerSubject)
        assert len({case.cluster for case in subject.server_cases}) == 1
        assert subject.question(subject.cases[0], 5)["amount"] == 5
        assert subject.seconds(subject.cases[0], 5, [{"seconds": 10.0}]) == 2.0


def test_sum_takes_as_long_as_its_slowest_process() -> None:
    subject = SumSubject(Cluster(2), (4096, 8192))
    assert subject.question(subject.cases[1], 3) == {"bytes": 8192, "rounds": 3}
    answers = [
        {"seconds": {"ring": 1.0, "compiler": 9.0}, "chosen": "ring"},
        {"seconds": {"ring": 2.0, "compiler": 9.0}, "chosen": "ring"},
    ]
    assert subject.seconds(subject.cases[1], 3, answers) == pytest.approx(2.0)
