"""Packages that do not fit together are found from their metadata."""

from __future__ import annotations

import time

import pytest

from stratagem.cli.doctor.settings import Finding, Level
from stratagem.cli.doctor.versions import (
    check_extras,
    check_plugins,
    check_requirements,
    examined_requirements,
    installed_at_s,
    installed_versions,
    versions_for,
)

_REQUIRED = {
    "jax": ("jaxlib<=0.10.2,>=0.10.1", "numpy>=2.0", 'jaxlib==0.9 ; extra == "ci"'),
    "stratagem": ("keras<4,>=3.12", 'tomli ; python_version < "3.0"'),
}
_FITTING = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6", "keras": "3.15.1"}


def _problems(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(one.text, one.fix) for one in findings if one.level is Level.ERROR]


def test_this_environment_fits_together() -> None:
    required = examined_requirements()
    assert {"stratagem", "jax", "keras"} <= set(required)
    installed = versions_for(required, installed_versions())
    assert {"jaxlib", "scipy", "packaging"} <= set(installed)
    assert not _problems(check_requirements(required, installed))
    assert not check_plugins(installed, required["jax"])


def test_fitting_versions_are_listed() -> None:
    (finding,) = check_requirements(_REQUIRED, _FITTING)
    assert finding.level is Level.OK
    assert "jaxlib 0.10.2" in finding.text


@pytest.mark.parametrize(
    ("changed", "text", "fix"),
    [
        (
            {"jaxlib": "0.11.0"},
            "jaxlib 0.11.0 is installed, but jax requires jaxlib<=0.10.2,>=0.10.1.",
            'pip install "jaxlib<=0.10.2,>=0.10.1"',
        ),
        (
            {"keras": "4.0.0"},
            "keras 4.0.0 is installed, but stratagem requires keras<4,>=3.12.",
            'pip install "keras<4,>=3.12"',
        ),
        (
            {"numpy": None},
            "numpy is not installed, but jax requires it.",
            'pip install "numpy>=2.0"',
        ),
    ],
    ids=["wrong jaxlib", "later major", "missing"],
)
def test_what_does_not_fit_is_named(changed: dict[str, str | None], text: str, fix: str) -> None:
    versions = {name: version for name, version in {**_FITTING, **changed}.items() if version}
    assert _problems(check_requirements(_REQUIRED, versions)) == [(text, fix)]


def test_release_candidate_counts_as_its_version() -> None:
    versions = {**_FITTING, "keras": "3.16.0rc1"}
    assert not _problems(check_requirements(_REQUIRED, versions))


def test_requirement_that_cannot_be_read_is_left_out() -> None:
    assert not _problems(check_requirements({"jax": ("not a requirement !",)}, _FITTING))


@pytest.mark.parametrize("name", ["jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin"])
def test_plugin_of_another_jaxlib_is_an_error(name: str) -> None:
    assert check_plugins({"jaxlib": "0.10.2", name: "0.10.2"}) == []
    ((text, fix),) = _problems(check_plugins({"jaxlib": "0.10.2", name: "0.10.1"}))
    assert text.startswith(f"{name} 0.10.1 was built for another jaxlib than 0.10.2")
    assert fix == f'pip install "{name}==0.10.2"'


def test_libtpu_of_another_jax_is_an_error() -> None:
    requires = ['libtpu==0.0.42.* ; extra == "tpu"']
    assert check_plugins({"jaxlib": "0.10.2", "libtpu": "0.0.42.1"}, requires) == []
    ((text, _),) = _problems(check_plugins({"jaxlib": "0.10.2", "libtpu": "0.0.40"}, requires))
    assert text.startswith("libtpu 0.0.40 is installed, but jax requires libtpu==0.0.42.*")


def test_optional_package_outside_of_its_extra_is_a_warning() -> None:
    required = [
        "keras>=3.12",
        'ray[default]>=2.59 ; extra == "ray"',
        'grain>=1 ; extra == "data"',
    ]
    assert check_extras(required, {"ray": "2.60.0", "keras": "1.0"}) == []
    (finding,) = check_extras(required, {"ray": "2.9.0"})
    assert finding.level is Level.WARNING
    assert finding.text == "ray 2.9.0 is installed, but stratagem[ray] requires ray>=2.59."
    assert finding.fix == 'pip install "ray>=2.59"'


def test_optional_packages_of_this_environment_fit() -> None:
    required = examined_requirements()["stratagem"]
    assert any("extra ==" in text for text in required)
    assert check_extras(required, installed_versions()) == []


def test_time_of_an_installation_is_of_its_metadata() -> None:
    installed_s = installed_at_s("jaxlib")
    assert installed_s is not None
    assert 0 < installed_s < time.time()
    assert installed_at_s("no-such-package") is None
