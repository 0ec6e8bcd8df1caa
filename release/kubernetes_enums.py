"""Renews the values of Kubernetes' enumerations, which its published schemas leave out.

    python release/kubernetes_enums.py FOLDER VERSION

FOLDER is the source of k8s.io/api, such as /usr/share/gocode/src/k8s.io/api of Debian's package
golang-k8s-api-dev; VERSION is its version, such as 0.36.4.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).parents[1] / "src" / "stratagem" / "manifests" / "enums.json"
PACKAGES = ("apps/v1", "batch/v1", "core/v1", "networking/v1", "policy/v1")

_TYPE = re.compile(r"^//\s*\+enum\n(?://.*\n)*type (\w+) string", re.MULTILINE)
_CONSTANT = re.compile(r'^\s+\w+\s+(\w+)\s*=\s*"([^"]*)"', re.MULTILINE)
_STRUCT = re.compile(r"^type (\w+) struct \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r'^\s+\w+\s+(\*|\[\])?(\w+)\s+`json:"(\w+)', re.MULTILINE)


def main(folder: str, version: str) -> None:
    """Writes the file, and prints the number of fields."""
    fields = {
        definition: values
        for package in PACKAGES
        for definition, values in _definitions(package, Path(folder, package, "types.go"))
    }
    content = {
        "source": f"k8s.io/api v{version} (Apache-2.0): types marked +enum",
        "fields": dict(sorted(fields.items())),
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{FILE}: {sum(map(len, fields.values()))} fields")


def _definitions(package: str, file: Path) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yields the name of a definition, and the values of its fields; "[]" marks those of a list."""
    text = file.read_text()
    values: dict[str, list[str]] = {name: [] for name in _TYPE.findall(text)}
    for name, value in _CONSTANT.findall(text):
        if name in values and value not in values[name]:
            values[name].append(value)
    for struct, body in _STRUCT.findall(text):
        found = {
            field + ("[]" if mark == "[]" else ""): sorted(values[name])
            for mark, name, field in _FIELD.findall(body)
            if values.get(name)
        }
        if found:
            yield f"io.k8s.api.{package.replace('/', '.')}.{struct}", found


if __name__ == "__main__":
    main(*sys.argv[1:])
