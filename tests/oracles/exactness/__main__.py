"""Tests the rules' distributions: `python -m tests.oracles.exactness --output results.json`.

Every setting meets every rule, every shape of draft does, and fused trees of retrieval, recycled
logits, a head and a draft model; `--full` takes all combinations. What stands in the output file
already is not tested again, so that an interrupted run goes on.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.comparison import circumstances
from tests.oracles.exactness.chi_square_table import tables
from tests.oracles.exactness.fused_trees import (
    SHAPES_IN_LOOP,
    fused_cases,
    run_fused,
    run_planted_in_trees,
)
from tests.oracles.exactness.planted_errors import run_planted
from tests.oracles.exactness.trials import (
    SIGNIFICANCE,
    Case,
    TrialOutcome,
    all_cases,
    corrected,
    covering_cases,
    run,
)

_FUSED_SHARE = 20
"""Fused drafts are made by models, in the decoding loop, which takes a hundred times as long as a
scripted draft: so many times fewer tokens are looked at there."""


def tested(case: Case, draws: int) -> TrialOutcome:
    """Test a case with so many draws, or its share of them."""
    if case.shape in SHAPES_IN_LOOP:
        return run_fused(case, _draws_of(case.shape, draws))
    return run(case, draws)


def _draws_of(shape: str, draws: int) -> int:
    return draws // _FUSED_SHARE if shape in SHAPES_IN_LOOP else draws


def planted_errors(draws: int) -> dict[str, dict[str, Any]]:
    """Test rules and fused drafts with errors in them, by a tenth of the draws."""
    found = {
        **run_planted(draws // 10),
        **run_planted_in_trees(_draws_of(SHAPES_IN_LOOP[0], draws)),
    }
    return {error: outcome.report() for error, outcome in found.items()}


def summary(cases: list[dict[str, Any]], planted: dict[str, Any]) -> dict[str, Any]:
    """Return the report of some cases, with p-values corrected for their number."""
    adjusted = corrected([case["p"] for case in cases])
    return {
        **circumstances(),
        "significance": SIGNIFICANCE,
        "smallest_corrected_p": min(adjusted),
        "cases": [{**case, "corrected_p": p} for case, p in zip(cases, adjusted, strict=True)],
        "planted": planted,
    }


def kept(output: Path, draws: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what an output file holds: tests with so many draws, and planted errors."""
    if not output.exists():
        return [], {}
    report: dict[str, Any] = json.loads(output.read_text())
    enough = [case for case in report["cases"] if case["draws"] >= _draws_of(case["shape"], draws)]
    return enough, report["planted"]


def main(
    *,
    output: Annotated[Path, typer.Option(help="Where the report is, or shall be.")],
    draws: Annotated[int, typer.Option(min=1, help="Tokens for each case.")] = 100_000,
    limit_s: Annotated[float, typer.Option(help="Begin no test after so many seconds.")] = 1e9,
    full: Annotated[bool, typer.Option("--full", help="Test all combinations.")] = False,
) -> None:
    """Test rules by chi-square; the exit status tells whether all are exact."""
    until = time.monotonic() + limit_s
    cases, planted = kept(output, draws)
    names = ("setting", "shape", "kind", "coupled")
    known = {tuple(case[name] for name in names) for case in cases}
    wanted = [*(all_cases() if full else covering_cases()), *fused_cases(full=full)]
    missing = [c for c in wanted if (c.setting, c.shape, c.kind, c.coupled) not in known]
    for case in missing:
        if time.monotonic() < until:
            cases.append(tested(case, draws).report())
    if not planted:
        planted = planted_errors(draws)
    report = summary(cases, planted)
    output.write_text(json.dumps(report, indent=1) + "\n")
    output.with_suffix(".md").write_text(tables(report))
    overlooked = [error for error, found in planted.items() if found["p"] > SIGNIFICANCE]
    print(f"{len(cases)} of {len(wanted)} cases, {sum(case['draws'] for case in cases):,} draws")
    print(f"smallest p after correction: {report['smallest_corrected_p']:.3f}")
    print(f"planted errors: {len(planted) - len(overlooked)} of {len(planted)} found {overlooked}")
    if report["smallest_corrected_p"] <= SIGNIFICANCE or overlooked or len(cases) < len(wanted):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
