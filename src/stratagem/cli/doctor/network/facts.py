"""Facts about this machine that a survey compares between hosts."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from typing import Any

from stratagem.cli.doctor.accelerators import counted_devices, probe_devices
from stratagem.cli.doctor.examination import examine
from stratagem.cli.doctor.settings import Finding, Level
from stratagem.cli.doctor.versions import installed_versions

# Packages that must be equal on all hosts.
COMPARED = ("stratagem", "jax", "jaxlib", "keras")


def gather_facts(made_before: Sequence[Finding] = ()) -> dict[str, Any]:
    """Returns versions, devices, and the warnings and errors of `stratagem doctor`.

    Args:
        made_before: findings about this host's address, made before an agent listened there.
    """
    probe = probe_devices()
    findings = [*made_before, *examine(probe=probe, has_cluster=False)]
    problems = [one for one in findings if one.level in (Level.WARNING, Level.ERROR)]
    return {
        "versions": {"Python": platform.python_version(), **installed_versions(COMPARED)},
        "devices": ", ".join(counted_devices(probe.devices)) or "none",
        "findings": [dataclasses.asdict(one) for one in problems],
    }
