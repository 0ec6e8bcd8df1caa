"""`linkcode_resolve`: the lines of the repository that define a Python object."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

_REPOSITORY = Path(__file__).parents[2]


def lines_of(module: str, name: str) -> str | None:
    """Returns "src/stratagem/errors.py#L10-L20", or None for what no line of ours defines."""
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = inspect.getattr_static(value, part, None) or getattr(value, part)
        value = value.fget if isinstance(value, property) else value
        value = inspect.unwrap(getattr(value, "__func__", value))
        path = Path(inspect.getsourcefile(value) or "").resolve()
        lines, first = inspect.getsourcelines(value)
    except (AttributeError, ImportError, OSError, TypeError):
        return None
    if not path.is_relative_to(_REPOSITORY / "src"):
        return None
    return f"{path.relative_to(_REPOSITORY)}#L{first}-L{first + len(lines) - 1}"


def _set_resolver(_: Sphinx, config: Config) -> None:
    def resolve(domain: str, info: dict[str, str]) -> str | None:
        place = lines_of(info["module"], info["fullname"]) if domain == "py" else None
        return place and f"{config.repository_url}/blob/{config.repository_branch}/{place}"

    config.linkcode_resolve = resolve


def setup(app: Sphinx) -> dict[str, bool]:
    """Sets the function that sphinx.ext.linkcode calls."""
    app.connect("config-inited", _set_resolver)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
