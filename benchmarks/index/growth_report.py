"""Writing down how drafts change with the size of the corpus, and what building took."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

SYNTHETIC: Final = (
    "Synthetic: the share of text that was stitched together from random spans of 20 to 60 words "
    "of the given documents."
)
_HEADER: Final = (
    "| tokens | synthetic | segments | bytes per token | build, s | tokens per step "
    "| draft, \u00b5s: p50 | p90 | p99 | p50 to the size before |"
)
_OTHERS_HEADER: Final = "| tokens | drafter | tokens per step | draft, \u00b5s: p50 | p90 | p99 |"
_LAYOUT_HEADER: Final = (
    "| tokens | ours, bytes per token | without phrase tables | infini-gram's layout "
    "| built, tokens/s, end to end | reading and tokenising | sorting | counting n-grams |"
)


def write(stem: Path, report: dict[str, Any]) -> None:
    """Write `stem` with `.json` and `.md`."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_name(f"{stem.name}.md").write_text(as_markdown(report["sizes"]))


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tables for people."""
    tables = [[_HEADER, "|---" * 10 + "|", *map(_size, rows)], [SYNTHETIC], _layouts(rows)]
    if any(row["against"] for row in rows):
        tables.append([_OTHERS_HEADER, "|---" * 6 + "|", *(line for r in rows for line in _all(r))])
    return "\n\n".join("\n".join(table) for table in tables) + "\n"


def _size(row: dict[str, Any]) -> str:
    ratio = row["p50_to_size_before"]
    return (
        f"| {row['tokens']:,} | {row['synthetic_share']:.0%} | {row['segments']} "
        f"| {row['bytes_per_token']:.2f} | {row['build']['seconds']:.1f} "
        f"| {row['tokens_per_step']:.3f} | {_times(row)} | {f'{ratio:.2f}' if ratio else ''} |"
    )


def _layouts(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"| {row['tokens']:,} | {row['bytes_per_token']:.2f} "
        f"| {row['bytes_per_token_without_phrases']:.2f} "
        f"| {row['bytes_per_token_infini_gram']:.2f} | {row['build']['tokens_per_s']:,} "
        f"| {_rates(row)} |"
        for row in rows
    ]
    return [_LAYOUT_HEADER, "|---" * 8 + "|", *lines]


def _rates(row: dict[str, Any]) -> str:
    """Return tokens a second of each stage."""
    stages = row["build"]["stage_seconds"].values()
    return " | ".join(f"{row['tokens'] / max(seconds, 1e-9):,.0f}" for seconds in stages)


def _all(row: dict[str, Any]) -> list[str]:
    """Return a line for each drafter; the others are our readings of rules, and are called so."""
    readings = {f"{name} (our reading)": of for name, of in row["against"].items()}
    return [
        f"| {row['tokens']:,} | {name} | {figures['tokens_per_step']:.3f} | {_times(figures)} |"
        for name, figures in {"ours": row, **readings}.items()
    ]


def _times(figures: dict[str, Any]) -> str:
    return " | ".join(f"{time:,.1f}" for time in figures["draft_us"].values())
