"""Checks that installed packages fit together, from their own metadata."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
from collections.abc import Iterable, Iterator, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from stratagem.cli.doctor.findings import Finding, error, ok, warning

# Shown, and checked with all that they require.
PACKAGES = (
    "stratagem",
    "jax",
    "jaxlib",
    "keras",
    "numpy",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "libtpu",
    "orbax-checkpoint",
    "ray",
    "grain",
    "tensorboard",
    "tensorflow",
    "torch",
)
_CHECKED = ("stratagem", "jax", "keras", "orbax-checkpoint", "ray")


def installed_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    found: dict[str, str] = {}
    for name in packages:
        # A nightly build is the same package by another name.
        for distribution in (name, f"{name}-nightly"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(name, importlib.metadata.version(distribution))
    return found


def requirements() -> dict[str, list[Requirement]]:
    """Returns what the installed ones of the checked packages require, with their extras."""
    found: dict[str, list[Requirement]] = {}
    for name in _CHECKED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = parsed(importlib.metadata.requires(name) or ())
    return found


def parsed(texts: Iterable[str]) -> list[Requirement]:
    """Returns the requirements that apply here; those of extras all do."""
    found: list[Requirement] = []
    for text in texts:
        with contextlib.suppress(InvalidRequirement):  # of a package that is not ours to mend
            one = Requirement(text)
            if _extra(one) or one.marker is None or one.marker.evaluate({"extra": ""}):
                found.append(one)
    return found


def check_versions(
    required: Mapping[str, Iterable[Requirement]], installed: Mapping[str, str]
) -> Iterator[Finding]:
    """Compares the requirements of packages, and the plugins of JAX, with what is installed."""
    known = dict(installed)
    findings: dict[str, Finding] = {}
    for package, several in required.items():
        known |= installed_versions(
            [one.name for one in several if not (_extra(one) or one.name in known)]
        )
        for one in several:
            found = _mismatch(package, one, known.get(one.name))
            if found is not None:
                findings.setdefault(found.text, found)
    jaxlib = installed.get("jaxlib")
    for name, version in installed.items():
        # Built for exactly one version of jaxlib.
        if name.startswith("jax-cuda") and jaxlib and version != jaxlib:
            findings[name] = error(
                f"{name} {version} was built for another jaxlib than {jaxlib}; JAX ignores it.",
                f'pip install "{name}=={jaxlib}"',
            )
    shown = ", ".join(f"{name} {known[name]}" for name in PACKAGES if name in known)
    yield from findings.values() or [
        ok(f"Python {platform.python_version()}, {shown} fit together.")
    ]


def _mismatch(package: str, one: Requirement, version: str | None) -> Finding | None:
    extra, wanted = _extra(one), f"{one.name}{one.specifier}"
    fix = f'pip install "{wanted}"'
    if version is None:
        missing = f"{one.name} is not installed, but {package} requires it."
        return None if extra else error(missing, fix)
    if one.specifier.contains(Version(version), prereleases=True):
        return None
    problem = f"{one.name} {version} is installed, but"
    if not extra or (package, one.name) == ("jax", "libtpu"):
        return error(f"{problem} {package} requires {wanted}.", fix)
    # Extras of other packages contradict each other.
    if package != "stratagem":
        return None
    return warning(f"{problem} stratagem[{extra}] requires {wanted}.", fix)


def _extra(one: Requirement) -> str:
    found = re.search(r"extra == ['\"]([\w-]+)['\"]", str(one.marker or ""))
    return found[1] if found else ""
