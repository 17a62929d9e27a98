"""The shared design of pages: colours of sources, fonts, tables, and content security policy."""

import base64
import hashlib
from importlib.resources import files
from typing import Final

from retriever.tree import Source

# Colours of sources that are no databases of a service, and so define none themselves.
_OTHERS: Final = {
    Source.MODEL: "#56b4e9",
    Source.GRAMMAR: "#b2df8a",
    Source.UNSPECIFIED: "#999999",
}


def colours() -> dict[str, str]:
    """Return the colour of each source that has one, by label, as `#rrggbb`."""
    shown = {source: source.colour or _OTHERS.get(source, "") for source in Source}
    return {source.label: colour for source, colour in shown.items() if colour}


def style_of(page: str = "") -> str:
    """Return the style sheet of a page.

    An element of class `source-LABEL` has the colour of its source as `--colour`.

    Args:
        page: extra rules of the page, after the shared ones.
    """
    shared = files("retriever.operations").joinpath("design.css").read_text(encoding="utf-8")
    by_source = [
        f".source-{label} {{ --colour: {colour}; }}" for label, colour in colours().items()
    ]
    return "\n".join([shared.strip(), *by_source, page.strip(), ""])


def hash_of(text: str) -> str:
    """Return the hash of an embedded style or script for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
