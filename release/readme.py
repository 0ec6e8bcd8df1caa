"""Build hook: the README as package metadata, with absolute links.

Links in README.md are relative, so that they work in any checkout and fork. Package indexes need
absolute ones; they are made from the Source URL in pyproject.toml, the only place of that URL.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE_LINK = re.compile(
    r"(?P<is_image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#|mailto:)(?P<path>[^)\s]+)\)"
)


def with_absolute_links(text: str, source_url: str, ref: str) -> str:
    """Returns Markdown whose relative links point to a git ref of the repository.

    Args:
        text: Markdown.
        source_url: URL of the repository on a forge that serves `/blob/REF/` and `/raw/REF/`.
        ref: branch or tag.
    """

    def absolute(link: re.Match[str]) -> str:
        view = "raw" if link["is_image"] else "blob"
        return f"{link['is_image']}[{link['text']}]({source_url}/{view}/{ref}/{link['path']})"

    return _RELATIVE_LINK.sub(absolute, text)


class CustomMetadataHook(MetadataHookInterface):
    """Adds the `readme` field."""

    def update(self, metadata):
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        ref = f"v{metadata['version']}"
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_absolute_links(text, metadata["urls"]["Source"], ref),
        }
