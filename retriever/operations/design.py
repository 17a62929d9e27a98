"""The design that pages share: colours of sources, type, tables, and the policy of a page."""

import base64
import hashlib
from importlib.resources import files
from typing import Final

from retriever.tree import Source

# Sources that are no database of a service state no colour: one of the same palette, and grey.
_OTHERS: Final = {
    Source.MODEL: "#56b4e9",
    Source.GRAMMAR: "#b2df8a",
    Source.UNSPECIFIED: "#999999",
}


def colours() -> dict[str, str]:
    """Return the colour of each source that has one, by its label, as `#rrggbb`."""
    shown = {source: source.colour or _OTHERS.get(source, "") for source in Source}
    return {source.label: colour for source, colour in shown.items() if colour}


def style_of(page: str = "") -> str:
    """Return the style of a page.

    In it an element of class `source-LABEL` has its source's colour as `--colour`.

    Args:
        page: rules of its own, which follow those that all pages share.
    """
    shared = files("retriever.operations").joinpath("design.css").read_text(encoding="utf-8")
    by_source = [
        f".source-{label} {{ --colour: {colour}; }}" for label, colour in colours().items()
    ]
    return "\n".join([shared.strip(), *by_source, page.strip(), ""])


def hash_of(text: str) -> str:
    """Return what a Content-Security-Policy names an embedded style or script by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
