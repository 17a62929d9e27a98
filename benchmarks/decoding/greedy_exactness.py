"""Whether greedy decoding with drafts writes what `model.generate` writes, token for token.

    python -m benchmarks.decoding.greedy_exactness --prompts questions.jsonl.gz --output exact.jsonl

All decode every prompt in float32, by default the decoder as it comes: measured budget, and a
drafter that remembers its answers to earlier prompts. `--contender NAME` takes other drafters, as
`foredraft bench` does, and `--contender all` every one that has something to draft with; `--index`,
`--draft-model`, `--speculator` and all that drafts come from are those of `foredraft bench`, too.
Every prompt is generated plainly once, and all contenders are compared with that. The first line of
the file says how; each line after it is one prompt. `--resume` goes on where a file ends. A
difference is an error (exit code 1): the report names its position and how far apart the two best
logits stand there, computed afresh in float64. Sums in passes of other widths are rounded in other
places, so that a tie may fall either way.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import track

from decoder.assembly import check_drafts
from decoder.commands.prompts import read_prompts
from decoder.drafters.options import DraftOptions
from decoder.errors import ContradictoryOptionsError, DecoderError
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.plugins.bench.bench import BenchPrompt, circumstances, fitting
from decoder.plugins.bench.exactness import Outputs, differences
from decoder.plugins.contenders.contender import FOREDRAFT, PLAIN, Contender
from decoder.plugins.contenders.registry import Contest, Setting, possible
from indexer.errors import IndexerError
from indexer.flags import with_flags
from indexer.tokenizer import DEFAULT_MODEL
from retriever.errors import RetrieverError

_ALL: Final = "all"
_IDENTIFYING: Final = (
    "model",
    "dtype",
    "drafter",
    "contenders",
    "nodes",
    "max_new_tokens",
    "prompts_sha256",
)


class ResumeError(Exception):
    """A file cannot be gone on with; the message says why."""


def compare(
    language_model: LanguageModel, ways: dict[str, Contender], case: BenchPrompt, number: int
) -> dict[str, Any]:
    """Decode one prompt in all ways and return a line of the file."""
    runs = {name: way([case.token_ids], remember=True) for name, way in ways.items()}
    plain = runs.pop(PLAIN).token_ids
    pairs = [Outputs(case.token_ids, plain, run.token_ids) for run in runs.values()]
    found = dict(zip(runs, differences(language_model, pairs), strict=True))
    return {
        "prompt": number,
        "category": case.category,
        "num_prompt_tokens": len(case.token_ids),
        "num_tokens": len(plain),
        "num_passes": {name: run.num_passes for name, run in runs.items()},
        "num_drafted": {name: run.statistics.num_drafted for name, run in runs.items()},
        "output_ids": plain,
        "differences": {name: each.as_json() for name, each in found.items() if each is not None},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many prompts have identical outputs with every contender, and the differences."""
    return {
        "prompts": len(rows),
        "identical": sum(not row["differences"] for row in rows),
        "identical_with": _identical_with(rows),
        "tokens": sum(row["num_tokens"] for row in rows),
        "passes": _summed(rows, "num_passes"),
        "nodes_verified": _summed(rows, "num_drafted"),
        "different": [
            {"prompt": row["prompt"], "category": row["category"], "contender": name, **found}
            for row in rows
            for name, found in row["differences"].items()
        ],
    }


def _identical_with(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return for how many prompts each contender's output is the plain one."""
    names = rows[0]["num_passes"] if rows else ()
    return {name: sum(name not in row["differences"] for row in rows) for name in names}


def _summed(rows: list[dict[str, Any]], key: str) -> dict[str, int]:
    return {name: sum(row[key][name] for row in rows) for name in (rows[0][key] if rows else ())}


def _rows(output: Path, head: dict[str, Any], *, resume: bool) -> list[dict[str, Any]]:
    """Begin a file, or return what one holds; a last line that is torn is cut off.

    Raises:
        ResumeError: the file is there and is not to be gone on with, or belongs to another run.
    """
    if not output.exists():
        output.write_text(json.dumps(head) + "\n")
        return []
    if not resume:
        raise ResumeError(f"{output} is there already: go on with --resume, or name another file")
    text = output.read_text()
    whole = text[: text.rfind("\n") + 1]
    lines = [json.loads(line) for line in whole.splitlines()]
    asked = {name: head[name] for name in _IDENTIFYING}
    if not lines or any(lines[0].get(name) != value for name, value in asked.items()):
        raise ResumeError(f"{output} belongs to another run: it does not say {asked}")
    output.write_text(whole)
    return lines[1:]


@with_flags
def measure(  # noqa: PLR0913  options
    *,
    drafts: DraftOptions,
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    output: Annotated[Path, typer.Option(help="JSON lines, written as it goes.")],
    model: Annotated[str, typer.Option(help="The model.")] = DEFAULT_MODEL,
    contender: Annotated[
        list[str] | None, typer.Option(help="What drafts, or all. Repeatable.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Default: as many as pay.")] = None,
    per_category: Annotated[int | None, typer.Option(min=1, help="Most of each.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each.")] = 64,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a file.")] = False,
) -> None:
    """Decode prompts in all ways and compare."""
    if drafts.draft_sampling:
        raise ContradictoryOptionsError("--draft-sampling has no effect here: outputs are greedy")
    check_drafts(drafts)
    names = contender or [FOREDRAFT]
    if _ALL in names:
        names = [name for name in possible(drafts) if name != PLAIN]
    language_model = load_model(ModelOptions(model, precision=Precision.FLOAT32))
    head = {
        **circumstances(language_model),
        "drafter": drafts.describe(),
        "contenders": names,
        "nodes": nodes,
        "max_new_tokens": max_new_tokens,
        "prompts_sha256": sha256(prompts.read_bytes()).hexdigest(),
    }
    rows = _rows(output, head, resume=resume)
    contest = Contest(language_model, [PLAIN, *names], drafts, max_new_tokens)
    with contest.opened(Setting(nodes)) as lineup:
        selected = read_prompts(prompts, limit, per_category)
        cases = fitting(language_model, lineup.target, selected)
        todo = list(enumerate(cases))[len(rows) :]
        with output.open("a", encoding="utf-8") as file:
            for number, case in track(todo, "prompts", console=Console(stderr=True)):
                rows.append(compare(language_model, lineup.ways, case, number))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
    result = {**summary(rows), **head}
    output.with_suffix(".summary.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    if result["different"]:
        raise typer.Exit(1)


def main() -> None:
    """Run the command; what goes wrong is said in one line."""
    try:
        typer.run(measure)
    except (DecoderError, IndexerError, RetrieverError, ResumeError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
