"""Definitions of custom resources that projects release, as schemas that refuse unknown fields.

`make test-external NAME=crds` downloads them; `crds.toml` has their checksums.
"""

from __future__ import annotations

import functools
import hashlib
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "build" / "crds"
TOML = Path(__file__).with_name("crds.toml")
RELEASED = tomllib.loads(TOML.read_text())["crds"]


@functools.cache
def validators() -> dict[tuple[str, str], Any]:
    """Validators by API version and kind; skips the test if nothing was downloaded."""
    found = {}
    for name, one in RELEASED.items():
        file = FOLDER / f"{name}.yaml"
        if not file.exists():
            pytest.skip(f"needs {file.name} of {one['repository']}: make test-external NAME=crds")
        content = file.read_bytes()
        assert hashlib.sha256(content).hexdigest() == one["sha256"], f"{file} is another version"
        spec = yaml.safe_load(content)["spec"]
        for version in spec["versions"]:
            schema = _strict(version["schema"]["openAPIV3Schema"])
            key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            # OpenAPI 3.0 has the keywords of this draft, such as exclusiveMinimum: true.
            found[key] = jsonschema.Draft4Validator(schema)
    return found


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    result = dict(schema)
    fields = schema.get("properties", {})
    result["properties"] = {name: _strict(one) for name, one in fields.items()}
    for key in ("items", "not", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = _strict(schema[key])
    for key in ("allOf", "anyOf", "oneOf"):
        if key in schema:
            result[key] = [_strict(one) for one in schema[key]]
    # Missing values are filled in before they are checked.
    required = schema.get("required", ())
    result["required"] = [name for name in required if "default" not in fields.get(name, {})]
    if fields and schema.get("type") == "object":
        is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
        result.setdefault("additionalProperties", is_open)
    return {"anyOf": [{"type": "null"}, result]} if schema.get("nullable") else result
