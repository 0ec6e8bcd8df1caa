"""Checks that installed packages fit together, from their own metadata."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from stratagem.cli.doctor.findings import Finding, Level

_TOPIC = "versions"
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
# Built for exactly one version of jaxlib; JAX ignores the plugin if they differ.
_PLUGINS = tuple(name for name in PACKAGES if name.startswith("jax-cuda"))
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


def check_requirements(
    required: Mapping[str, Iterable[str]], installed: Mapping[str, str]
) -> list[Finding]:
    """Compares the requirements of packages with the installed versions.

    Requirements of extras are left out: they contradict each other.

    Args:
        required: requirements by package, as in its metadata.
        installed: versions by package.
    """
    findings: list[Finding] = []
    for package, texts in required.items():
        for requirement in _parsed(texts):
            version = installed.get(requirement.name)
            if version is None and _is_unconditional(requirement):
                findings.append(
                    Finding(
                        _TOPIC,
                        Level.ERROR,
                        f"{requirement.name} is not installed, but {package} requires it.",
                        f'pip install "{_text(requirement)}"',
                    )
                )
            elif version is not None and not _allows(requirement, version):
                findings.append(_mismatch(package, requirement, version))
    if not findings:
        shown = ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)
        findings.append(
            Finding(_TOPIC, Level.OK, f"Python {platform.python_version()}, {shown} fit together.")
        )
    return findings


def check_extras(required: Iterable[str], installed: Mapping[str, str]) -> list[Finding]:
    """Compares installed optional packages with the extras that name them.

    Args:
        required: requirements of this package, with its extras.
        installed: versions by package.
    """
    found: dict[str, Finding] = {}
    for text in required:
        requirement = Requirement(text)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
        version = installed.get(requirement.name)
        if extra is None or version is None:
            continue
        if _allows(requirement, version):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        found.setdefault(
            requirement.name,
            Finding(
                _TOPIC,
                Level.WARNING,
                f"{requirement.name} {version} is installed, but stratagem[{extra[1]}] requires "
                f"{wanted}.",
                f'pip install "{_text(requirement)}"',
            ),
        )
    return list(found.values())


def installed_at_s(package: str) -> float | None:
    """Returns when a package was installed, as Unix time; None if unknown."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    name = re.sub(r"[-_.]+", "_", package)
    folder = Path(str(distribution.locate_file(f"{name}-{distribution.version}.dist-info")))
    return folder.stat().st_mtime if folder.exists() else None


def check_plugins(installed: Mapping[str, str], jax_requires: Iterable[str] = ()) -> list[Finding]:
    """Checks that accelerator plugins fit jaxlib, and libtpu the extra of JAX.

    Args:
        installed: versions by package.
        jax_requires: what JAX requires, with its extras.
    """
    jaxlib = installed.get("jaxlib")
    findings = [
        Finding(
            _TOPIC,
            Level.ERROR,
            f"{name} {installed[name]} was built for another jaxlib than {jaxlib}; JAX ignores it.",
            f'pip install "{name}=={jaxlib}"',
        )
        for name in _PLUGINS
        if name in installed and jaxlib and installed[name] != jaxlib
    ]
    for text in jax_requires:
        requirement = Requirement(text)
        version = installed.get("libtpu")
        if requirement.name == "libtpu" and version and not _allows(requirement, version):
            findings.append(_mismatch("jax", requirement, version))
    return findings


def examined_requirements() -> dict[str, tuple[str, ...]]:
    """Returns the requirements of the checked packages that are installed."""
    found: dict[str, tuple[str, ...]] = {}
    for name in _CHECKED:
        try:
            found[name] = tuple(importlib.metadata.requires(name) or ())
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def versions_for(
    required: Mapping[str, Iterable[str]], installed: Mapping[str, str]
) -> dict[str, str]:
    """Returns the versions in `installed`, and those of all packages that others require."""
    names = {requirement.name for texts in required.values() for requirement in _parsed(texts)}
    return {**installed, **installed_versions(sorted(names - set(installed)))}


def _parsed(texts: Iterable[str]) -> list[Requirement]:
    parsed: list[Requirement] = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # of a package that is not ours to mend
            continue
        if _applies(requirement):
            parsed.append(requirement)
    return parsed


def _applies(requirement: Requirement) -> bool:
    marker = requirement.marker
    return marker is None or ("extra" not in str(marker) and marker.evaluate({"extra": ""}))


def _is_unconditional(requirement: Requirement) -> bool:
    return "extra" not in str(requirement.marker or "")


def _allows(requirement: Requirement, version: str) -> bool:
    return requirement.specifier.contains(Version(version), prereleases=True)


def _text(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _mismatch(package: str, requirement: Requirement, version: str) -> Finding:
    return Finding(
        _TOPIC,
        Level.ERROR,
        f"{requirement.name} {version} is installed, but {package} requires {_text(requirement)}.",
        f'pip install "{_text(requirement)}"',
    )
