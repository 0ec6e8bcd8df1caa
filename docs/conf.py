"""Configuration of the documentation site, which `make docs` builds."""

from __future__ import annotations

import logging
import os
import sys
import tomllib
from pathlib import Path

_REPOSITORY = Path(__file__).parents[1]
_EXTENSIONS = _REPOSITORY / "docs" / "_extensions"
sys.path.insert(0, str(_EXTENSIONS))

# Notebooks, and modules that are imported for their docstrings, leave accelerators alone.
os.environ.update(JAX_PLATFORMS="cpu", KERAS_BACKEND="jax", TF_CPP_MIN_LOG_LEVEL="2")
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")

_PROJECT = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
# The fallback is a name that no server has: set [project.urls] to publish.
_SOURCE = _PROJECT.get("urls", {}).get("Source", "https://stratagem.example/source").rstrip("/")

project = "Stratagem"
author = "The Stratagem Authors"
project_copyright = "The Stratagem Authors"
version = release = _PROJECT["version"]

extensions = [
    "myst_nb",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
    "notebook_order",
    "migration_symbols",
    "repository_links",
    "search_descriptions",
    "versions",
]
exclude_patterns = ["_*", "pictures", "**/.ipynb_checkpoints"]
nitpicky = True

# Our extensions.
repository_url = _SOURCE
repository_branch = "main"
generated_pages = ["reference/api/", "migrate/symbols", "genindex", "search"]

# Pages.
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div:not(.output):not(.highlight-text) > div.highlight > pre"

# A notebook that changed runs in a process of its own. One that fails is a warning, so an error.
nb_execution_mode = "cache"
nb_execution_cache_path = str(_REPOSITORY / "build" / "docs-cache" / "notebooks")
nb_execution_timeout = 1800  # A busy machine needs ten times the usual minute for a cell.
nb_execution_show_tb = True
nb_merge_streams = True

# Python: pages of the API are written by an extension of ours before Sphinx reads them.
extensions += [path.stem for path in _EXTENSIONS.glob("api_reference.py")]
add_module_names = False
toc_object_entries_show_parents = "hide"
python_display_short_literal_types = True
python_maximum_signature_line_length = 88

# Looks.
html_theme = "pydata_sphinx_theme"
html_title = f"Stratagem {release}"
html_short_title = "Stratagem"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [
    ("navigation_names.js", {"defer": "defer"}),
    ("search_on_files.js", {"defer": "defer"}),
]
templates_path = ["_templates"]
html_show_sourcelink = False
html_show_sphinx = False
html_copy_source = False
html_context = {
    "default_mode": "auto",
    "edit_page_url_template": f"{_SOURCE}/edit/main/docs/{{{{ file_name }}}}",
    "edit_page_provider_name": "GitHub" if "github.com" in _SOURCE else "the repository",
}
html_theme_options = {
    "logo": {
        "text": "Stratagem",
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo.svg",
        "alt_text": "",
    },
    "navbar_align": "left",
    "navbar_persistent": ["search_button"],
    "navbar_end": ["version_menu", "theme-switcher", "navbar-icon-links"],
    "header_links_before_dropdown": 6,
    "show_nav_level": 1,
    "navigation_depth": 3,
    "show_toc_level": 2,
    "search_bar_text": "Search",
    "use_edit_page_button": True,
    "secondary_sidebar_items": ["page-toc", "edit-this-page"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "icon_links": [{"name": "Source", "url": _SOURCE, "icon": "fa-solid fa-code-branch"}],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
# The home page has no sections beside it.
html_sidebars = {"index": []}


def _is_mistake(record: logging.LogRecord) -> bool:
    """Drops one warning: a section names its first pages, and then `*` for pages still to come."""
    return getattr(record, "subtype", None) != "empty_glob"


logging.getLogger("sphinx.sphinx.directives.other").addFilter(_is_mistake)
