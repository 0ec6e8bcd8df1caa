"""The list of published versions, beside the folders of the versions.

`docs/versions.toml` names the versions. The build writes them to `../versions.js`, which the
version menu of every page reads, also of pages built earlier. `../index.html` opens the newest.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

_OPENING = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={version}/index.html">
<title>Stratagem</title>
<p><a href="{version}/index.html">Stratagem {version}</a></p>
</html>
"""


def _write(app: Sphinx, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    listed = tomllib.loads((Path(app.srcdir) / "versions.toml").read_text("utf-8"))["versions"]
    folder = Path(app.outdir).parent
    script = f"window.stratagemVersions = {json.dumps(listed)};\n"
    (folder / "versions.js").write_text(script, "utf-8")
    (folder / "index.html").write_text(_OPENING.format(version=listed[0]), "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Writes both files after a build."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
