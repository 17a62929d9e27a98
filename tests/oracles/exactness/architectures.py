"""Decodes with every causal architecture that the installed transformers knows.

    python -m tests.oracles.exactness.architectures --output architectures.json

Of each, a tiny random model is made, which decodes with right, wrong, random, doubled and 200-node
drafts, past its windows, in float32; its output must be that of `model.generate`. Where it takes no
trees, no drafts, or is refused, it is made to take them all the same: something must be wrong then,
or else the reason is false. Each has a process and a time of its own. `--resume` goes on with a
file, `--only NAME` takes architectures by their name; `--page FILE` writes the table of
`docs/reference/architectures.md`.
"""

import json
import logging
import multiprocessing
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers.utils import logging as transformers_logging

from benchmarks.comparison import circumstances
from indexer.errors import reason_of
from tests.oracles.exactness.architecture_check import REFUSED, UNABLE, UNMADE, Finding, examined
from tests.oracles.exactness.tiny_models import architectures

TOO_LONG: Final = "too long"
BROKEN: Final = "examination fails"
_COLUMNS: Final = 100
_ORDER: Final = ("trees", "chains", "plain", REFUSED, UNABLE, UNMADE, TOO_LONG, BROKEN)

_MEANING: Final = {
    "trees": "A pass verifies whole trees of drafts.",
    "chains": "A pass verifies one chain of each draft.",
    "plain": "Drafts are not used: the model decodes one token in each pass.",
    REFUSED: "The model is refused with an error that names the reason.",
    UNABLE: "transformers' own `generate` fails on a tiny random model of these.",
    UNMADE: "transformers can't make a tiny random model of these on a bare machine.",
    TOO_LONG: "The examination took too long.",
    BROKEN: "The examination failed.",
}


def _get_ready() -> None:
    """Load once all that the processes share: they take what this one has."""
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # not typed there
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    examined("llama")


def _examine(architecture: str, sender: Connection) -> None:
    """Examine in a process of its own and send what was found."""
    try:
        sender.send(examined(architecture))
    except Exception as error:  # noqa: BLE001  it is told, and the others are examined
        sender.send(Finding(architecture, verifies=BROKEN, reason=reason_of(error)))


def found_of(architecture: str, limit_s: float) -> Finding:
    """Examine an architecture in another process, which is ended when its time is over."""
    context = multiprocessing.get_context("fork")  # what is imported need not be again
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_examine, args=(architecture, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(limit_s):
            found: Finding = receiver.recv()
            return found
        return Finding(architecture, verifies=TOO_LONG, reason=f"not done after {limit_s:.0f} s")
    except EOFError:
        return Finding(architecture, verifies=BROKEN, reason="its process ended")
    finally:
        process.kill()
        process.join()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the report of what was found."""
    findings = [Finding(**row) for row in rows]
    counts = {kind: sum(each.verifies == kind for each in findings) for kind in _ORDER}
    return {
        **circumstances(),
        "torch": torch.__version__,
        "architectures": len(rows),
        "counts": {kind: count for kind, count in counts.items() if count},
        "different": [each.architecture for each in findings if each.differences],
        "doubtful": [each.architecture for each in findings if not each.is_sound],
        "found": sorted(rows, key=lambda row: str(row["architecture"])),
    }


def page(report: dict[str, Any]) -> str:
    """Return what was found as a page of the documentation."""
    introduction = (
        "This page shows what models of your architecture can verify in one pass. It lists the "
        f"{report['architectures']} causal architectures of transformers "
        f"{report['transformers']}. For each, a tiny random model decoded in float32, past its "
        "attention windows, with right, wrong, random, doubled and 200-node drafts. Its output was "
        "compared with `model.generate`, token for token. "
        f"{_differing(report['different'])} Your own model gets a shorter form of this check when "
        "it is first used ([generating](../how-to/generating.md))."
    )
    source = "Written by `python -m tests.oracles.exactness.architectures`, option `--page`."
    head = ["# Architectures", "", *_wrapped(introduction), "", source, ""]
    return "\n".join([*head, *(line for kind in _ORDER for line in _section(report, kind))])


def _differing(different: list[str]) -> str:
    return f"Different: {', '.join(different)}." if different else "None differs."


def _section(report: dict[str, Any], kind: str) -> list[str]:
    rows = [row for row in report["found"] if row["verifies"] == kind]
    if not rows:
        return []
    head = [f"## {kind.capitalize()} ({len(rows)})", "", *_wrapped(_MEANING[kind]), ""]
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row["reason"], []).append(f"`{row['architecture']}`")
    if kind == "trees":
        return [*head, *_wrapped(", ".join(f"`{row['architecture']}`" for row in rows)), ""]
    common_first = sorted(by_reason.items(), key=lambda each: -len(each[1]))
    lines = [f"| {_cell(reason)} | {', '.join(names)} |" for reason, names in common_first]
    return [*head, "| why | architectures |", "|---|---|", *lines, ""]


def _wrapped(text: str) -> list[str]:
    return wrap(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(
    *,
    output: Annotated[Path, typer.Option(help="Where the report is, or shall be.")],
    only: Annotated[list[str] | None, typer.Option(help="One of them. Repeatable.")] = None,
    limit_s: Annotated[float, typer.Option(help="Most seconds of each.")] = 300.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a file.")] = False,
    page_at: Annotated[Path | None, typer.Option("--page", help="Where the table goes.")] = None,
) -> None:
    """Examine all architectures; the exit status tells whether all are exact, for true reasons."""
    rows: list[dict[str, Any]] = json.loads(output.read_text())["found"] if resume else []
    wanted = only or architectures()
    if only:
        rows = [row for row in rows if row["architecture"] not in only]
    known = {row["architecture"] for row in rows}
    missing = [name for name in wanted if name not in known]
    if missing:
        _get_ready()
    for name in track(missing, "architectures", console=Console(stderr=True)):
        rows.append(found_of(name, limit_s).report())
        output.write_text(json.dumps(summary(rows), indent=1) + "\n")
    report = summary(rows)
    output.write_text(json.dumps(report, indent=1) + "\n")
    if page_at is not None:
        page_at.write_text(page(report))
    print(f"{len(rows)} architectures: {report['counts']}")
    print(f"different: {report['different'] or 'none'}; doubtful: {report['doubtful'] or 'none'}")
    if report["different"] or report["doubtful"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
