"""Downloads the definitions of custom resources that `crds.toml` names, and checks them.

    python -m validation.crds [--renew]

With `--renew` it takes the newest release of each project, and writes its version, commit and
checksum. With Git's setting url.FOLDER.insteadOf, a copy of the repository is read instead.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import tempfile

from validation.crds.definitions import FOLDER, RELEASED, TOML

_RELEASE = re.compile(r"(?P<commit>[0-9a-f]{40})\s+refs/tags/(?P<tag>v[0-9.]+)(?P<peeled>\^\{\})?")


def main() -> None:
    parser = argparse.ArgumentParser(description="Downloads definitions of custom resources.")
    parser.add_argument("--renew", action="store_true", help="take the newest releases")
    renew = parser.parse_args().renew
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, one in RELEASED.items():
        if renew:
            one |= _newest(one["repository"])
        content = _download(one["repository"], one["version"], one["path"])
        checksum = hashlib.sha256(content).hexdigest()
        if renew:
            one["sha256"] = checksum
        elif checksum != one["sha256"]:
            raise SystemExit(f"{one['path']} of {one['repository']} is not {one['version']}")
        (FOLDER / f"{name}.yaml").write_bytes(content)
        print(f"{name}: {one['repository']} {one['version']}")
    if renew:
        _write()


def _newest(repository: str) -> dict[str, str]:
    """The newest release without a suffix such as -rc.0, by its number."""
    command = ["git", "ls-remote", "--tags", _address(repository)]
    listed = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    found = {}
    for match in map(_RELEASE.fullmatch, listed.splitlines()):
        if match is not None:  # a peeled tag names the commit, and follows the tag
            found[match["tag"]] = match["commit"]
    tag = max(found, key=lambda one: [int(part) for part in one[1:].split(".")])
    return {"version": tag, "commit": found[tag]}


def _download(repository: str, version: str, path: str) -> bytes:
    """The content of a file; no other file is fetched."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--quiet", "--bare", "--depth=1", "--filter=blob:none", f"--branch={version}")
        subprocess.run(["git", "clone", *options, _address(repository), folder], check=True)
        command = ["git", "-C", folder, "show", f"HEAD:{path}"]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def _address(repository: str) -> str:
    return f"https://github.com/{repository}"


def _write() -> None:
    head = "".join(line for line in TOML.read_text().splitlines(True) if line.startswith("#"))
    tables = [
        f"\n[crds.{name}]\n" + "".join(f'{key} = "{value}"\n' for key, value in one.items())
        for name, one in RELEASED.items()
    ]
    TOML.write_text(head + "".join(tables))


if __name__ == "__main__":
    main()
