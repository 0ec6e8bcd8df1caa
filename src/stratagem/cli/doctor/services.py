"""Ray and caches: other things that a run relies on."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.cli.doctor.finding import Finding, Level

_DASHBOARD_PORT = 8265
_ANSWER_LIMIT_S = 3.0
_LARGE_CACHE_BYTES = 20 * 2**30


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
    if unusable := _unusable(address, installed):
        return [unusable]
    token = _token(variables)
    request = _version_request(address, token)
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:  # noqa: S310
            version: Any = json.load(answer).get("ray_version")
    except urllib.error.HTTPError as error:
        with error:
            return [_refused(address, error, has_token=bool(token))]
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


def check_cache(folder: Path) -> list[Finding]:
    """Reports a folder of `STRATAGEM_CACHE_DIR` that is very large or read-only."""
    if (problem := _unwritable(folder, "STRATAGEM_CACHE_DIR")) is not None:
        return [problem]
    size_bytes = sum(stat.st_size for stat in _files(folder))
    if size_bytes <= _LARGE_CACHE_BYTES:
        return []
    return [
        Finding(
            "cache",
            Level.WARNING,
            f"{folder} holds {size_bytes / 2**30:.0f} GiB.",
            f"remove what no run uses: du -h {folder}; journals/ restores parameter servers.",
        )
    ]


def check_compilation_cache(
    folder: Path, jaxlib: str | None, installed_at_s: float | None, variable: str | None
) -> list[Finding]:
    """Reports a cache of compiled programs that is of no use: stale, or read-only.

    JAX looks programs up by a digest that includes the version of jaxlib. It cannot be read back,
    so the times are compared: no program is older than the jaxlib that can read it.

    Args:
        folder: where the programs are.
        jaxlib: installed version.
        installed_at_s: when that was installed, as Unix time.
        variable: environment variable that names the folder; None for the folder of programs in
            `STRATAGEM_CACHE_DIR`, which `check_cache` has tested.
    """
    if variable is not None and (problem := _unwritable(folder, variable)) is not None:
        return [problem]
    times_s = [stat.st_mtime for stat in _files(folder, "*-cache")]
    if not times_s:
        return []
    if installed_at_s is None or max(times_s) >= installed_at_s:
        return [Finding("cache", Level.OK, f"Compiled programs in {folder}: {len(times_s)}.")]
    return [
        Finding(
            "cache",
            Level.WARNING,
            f"The compiled programs in {folder} ({len(times_s)}) are older than jaxlib {jaxlib}, "
            f"installed {time.strftime('%Y-%m-%d %H:%M', time.localtime(installed_at_s))}; "
            "programs of another jaxlib are never read.",
            f"rm -r {folder}; the next run fills it again.",
        )
    ]


def _unwritable(folder: Path, variable: str) -> Finding | None:
    """Returns a finding if a folder cannot be written, or made."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return None
    reason = "is read-only here" if existing.is_dir() else "is a file"
    return Finding(
        "cache",
        Level.WARNING,
        f"{variable} cannot be written: {existing} {reason}. Each start repeats the work.",
        f"mount it writable, or set {variable} to a folder that is.",
    )


def _files(folder: Path, pattern: str = "*") -> list[os.stat_result]:
    found: list[os.stat_result] = []
    for path in folder.rglob(pattern):
        with contextlib.suppress(OSError):  # removed just now
            if path.is_file():
                found.append(path.stat())
    return found


def _unusable(address: str, installed: Mapping[str, str]) -> Finding | None:
    """Returns a finding if no request can be sent to `address`."""
    if "ray" not in installed:
        text = f"The environment names a Ray cluster at {address}, but Ray is not installed."
        return Finding("ray", Level.ERROR, text, "pip install 'stratagem[ray]'")
    if not address.startswith(("http://", "https://")):
        text = f"RAY_API_SERVER_ADDRESS is {address!r}, which is not the URL of a Ray dashboard."
        return Finding("ray", Level.ERROR, text, "RAY_API_SERVER_ADDRESS=http://HOST:8265")
    return None


def _version_request(address: str, token: str) -> urllib.request.Request:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return urllib.request.Request(f"{address}/api/version", headers=headers)  # noqa: S310


def _refused(address: str, error: urllib.error.HTTPError, *, has_token: bool) -> Finding:
    error.close()
    if error.code not in (401, 403):
        text, fix = f"answers {error.code} {error.reason}", "see the log of the head."
    elif has_token:
        text, fix = (
            "refuses the token of this machine",
            "set RAY_AUTH_TOKEN to the cluster's token.",
        )
    else:
        text = "wants a token, and this machine has none"
        fix = "set RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to its file."
    return Finding("ray", Level.ERROR, f"Ray's dashboard at {address} {text}.", fix)


def _token(variables: Mapping[str, str]) -> str:
    """Returns the token of Ray on this machine, "" for none."""
    if token := variables.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = variables.get("RAY_AUTH_TOKEN_PATH") or str(Path.home() / ".ray" / "auth_token")
    try:
        return Path(path).expanduser().read_text().strip()
    except OSError:
        return ""


def _dashboard(variables: Mapping[str, str]) -> str | None:
    api = variables.get("RAY_API_SERVER_ADDRESS")
    if api:
        return api.rstrip("/") if "://" in api else f"http://{api}"
    address = variables.get("RAY_ADDRESS", "")
    host = address.removeprefix("ray://").rpartition(":")[0]
    return f"http://{host}:{_DASHBOARD_PORT}" if host else None
