"""Tests the rules' distributions: `python -m benchmarks.exactness --output results.json`.

Every setting meets every rule, and every shape of draft does; `--full` takes all combinations. What
stands in the output file already is not tested again, so that an interrupted run goes on.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.comparison import circumstances
from benchmarks.exactness.chi_square_table import tables
from benchmarks.exactness.planted_errors import run_planted
from benchmarks.exactness.trials import (
    SIGNIFICANCE,
    all_cases,
    corrected,
    covering_cases,
    run,
)


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
    return [case for case in report["cases"] if case["draws"] >= draws], report["planted"]


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
    wanted = all_cases() if full else covering_cases()
    missing = [c for c in wanted if (c.setting, c.shape, c.kind, c.coupled) not in known]
    for case in missing:
        if time.monotonic() < until:
            cases.append(run(case, draws).report())
    if not planted:
        planted = {error: found.report() for error, found in run_planted(draws // 10).items()}
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
