"""Ray and caches: other things that a run relies on."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.doctor.finding import Finding, Level

__all__ = ["check_cache", "check_ray"]

_DASHBOARD_PORT = 8265
_ANSWER_LIMIT_S = 3.0
_LARGE_CACHE_BYTES = 20 * 2**30
_OLD_S = 90 * 24 * 3600


def check_ray(
    variables: Mapping[str, str],
    installed: Mapping[str, str],
    limit_s: float = _ANSWER_LIMIT_S,
) -> list[Finding]:
    """Compares Ray here with the cluster that the environment names.

    Args:
        variables: environment variables; `RAY_ADDRESS` and `RAY_API_SERVER_ADDRESS` are read.
        installed: versions by package.
        limit_s: seconds to wait for an answer.
    """
    address = _dashboard(variables)
    if address is None:
        return []
    if "ray" not in installed:
        return [
            Finding(
                "ray",
                Level.ERROR,
                f"The environment names a Ray cluster at {address}, but Ray is not installed.",
                "pip install 'stratagem[ray]'",
            )
        ]
    try:
        with urllib.request.urlopen(f"{address}/api/version", timeout=limit_s) as answer:
            version: Any = json.load(answer).get("ray_version")
    except (OSError, ValueError, AttributeError) as error:
        return [
            Finding(
                "ray",
                Level.WARNING,
                f"Ray's dashboard at {address} does not answer: {error}",
                "start the head with ray start --head --dashboard-host=0.0.0.0, or correct "
                "RAY_API_SERVER_ADDRESS.",
            )
        ]
    if version != installed["ray"]:
        return [
            Finding(
                "ray",
                Level.ERROR,
                f"Ray is {installed['ray']} here and {version} on the cluster; they must be equal.",
                f'pip install "ray[default]=={version}"',
            )
        ]
    return [Finding("ray", Level.OK, f"Ray {version} answers at {address}.")]


def check_cache(
    folder: Path, versions: Mapping[str, str], now_s: float | None = None
) -> list[Finding]:
    """Reports a cache folder that is very large, unwritable or no longer used.

    Args:
        folder: `STRATAGEM_CACHE_DIR`.
        versions: versions by package; a cache of another JAX is not read.
        now_s: Unix time; by default now.
    """
    if not folder.exists():
        return []
    now_s = time.time() if now_s is None else now_s
    files = [path for path in folder.rglob("*") if path.is_file()]
    stats = [path.stat() for path in files]
    size_bytes = sum(stat.st_size for stat in stats)
    findings: list[Finding] = []
    if size_bytes > _LARGE_CACHE_BYTES:
        findings.append(
            Finding(
                "cache",
                Level.WARNING,
                f"{folder} holds {size_bytes / 2**30:.0f} GiB.",
                f"rm -r {folder}; the next run fills it again.",
            )
        )
    if stats and now_s - max(stat.st_mtime for stat in stats) > _OLD_S:
        findings.append(
            Finding(
                "cache",
                Level.WARNING,
                f"{folder} was last written {(now_s - max(s.st_mtime for s in stats)) / 86400:.0f} "
                f"days ago; jax {versions.get('jax')} may not read it.",
                f"rm -r {folder}; the next run fills it again.",
            )
        )
    return findings


def _dashboard(variables: Mapping[str, str]) -> str | None:
    api = variables.get("RAY_API_SERVER_ADDRESS")
    if api:
        return api.rstrip("/") if "://" in api else f"http://{api}"
    address = variables.get("RAY_ADDRESS", "")
    host = address.removeprefix("ray://").rpartition(":")[0]
    return f"http://{host}:{_DASHBOARD_PORT}" if host else None
