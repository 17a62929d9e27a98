"""The results of exactness tests as tables for people."""

from typing import Any, Final

from tests.oracles.exactness.fused_trees import DRAWING, SHAPES_IN_LOOP, kind_of
from tests.oracles.exactness.scripted_target import SETTINGS
from tests.oracles.exactness.trials import RULES

_FUSED: Final = [(shape, kind_of(drawing)) for shape in SHAPES_IN_LOOP for drawing in DRAWING]


def tables(report: dict[str, Any]) -> str:
    """Return Markdown: p-values by setting and rule, and the planted errors."""
    draws = sum(case["draws"] for case in report["cases"])
    names = [f"{kind}, {'coupled' if coupled else 'not coupled'}" for kind, coupled in RULES]
    lines = [
        "# Exactness under sampling",
        "",
        f"{len(report['cases'])} chi-square tests, {draws:,} draws in all.",
        f"Smallest p after Holm's correction: {report['smallest_corrected_p']:.3f}.",
        "",
        "Uncorrected p, the smallest over the shapes of drafts, by kind of nodes and random",
        "numbers; in brackets tokens per pass for mixed trees.",
        "",
        f"| setting | {' | '.join(names)} |",
        f"|---{'|---' * len(names)}|",
        *(_row(setting, report["cases"]) for setting in SETTINGS),
        "",
        "Fused drafts in the decoding loop: retrieval and recycled logits certain, others drawn.",
        "",
        f"| setting | {' | '.join(f'{kind}, {shape}' for shape, kind in _FUSED)} |",
        f"|---{'|---' * len(_FUSED)}|",
        *(_fused_row(setting, report["cases"]) for setting in SETTINGS),
        "",
        "| planted error | p |",
        "|---|---|",
        *(f"| {error} | {found['p']:.1e} |" for error, found in report["planted"].items()),
    ]
    return "\n".join(lines) + "\n"


def _row(setting: str, cases: list[dict[str, Any]]) -> str:
    cells = []
    for rule in RULES:
        found = [c for c in cases if (c["setting"], c["kind"], c["coupled"]) == (setting, *rule)]
        mixed = [f" ({c['tokens_per_pass']:.2f})" for c in found if c["shape"] == "mixed"]
        cells.append(f"{min((c['p'] for c in found), default=1.0):.3f}{''.join(mixed)}")
    return f"| {setting} | {' | '.join(cells)} |"


def _fused_row(setting: str, cases: list[dict[str, Any]]) -> str:
    cells = []
    for shape_and_kind in _FUSED:
        wanted = setting, *shape_and_kind
        found = [c for c in cases if (c["setting"], c["shape"], c["kind"]) == wanted]
        shown = [f"{case['p']:.3f} ({case['tokens_per_pass']:.2f})" for case in found]
        cells.append(" ".join(shown) or "-")
    return f"| {setting} | {' | '.join(cells)} |"
