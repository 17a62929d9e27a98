"""Whether greedy decoding with drafts writes what `model.generate` writes, token for token.

    python -m benchmarks.decoding.greedy_exactness --prompts questions.jsonl.gz --output exact.jsonl

Both decode every prompt in float32, the decoder as it comes: measured budget, and a drafter that
remembers its answers to earlier prompts. The first line of the file says how; each line after it is
one prompt. `--resume` goes on where a file ends. A difference is an error (exit code 1): the report
names its position and how far apart the two best logits stand there, computed afresh in float64.
Sums in passes of other widths are rounded in other places, so that a tie may fall either way.
"""

import copy
import json
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import track

from decoder.assembly import DrafterSettings, assemble
from decoder.commands.bench import BenchPrompt, circumstances, fitting
from decoder.commands.prompts import read_prompts
from decoder.contenders.contender import FOREDRAFT, PLAIN, Contender, contenders
from decoder.errors import DecoderError
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from indexer.errors import IndexerError
from indexer.tokenizer import DEFAULT_MODEL
from retriever.errors import RetrieverError

_TIE: Final = 1e-4
_WAYS: Final = (PLAIN, FOREDRAFT)


class ResumeError(Exception):
    """A file cannot be gone on with; the message says why."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two outputs part.

    Attributes:
        position: of the first token that differs, counted from the first generated one.
        plain: what `model.generate` wrote there, `None` where it had ended.
        drafted: what the decoder wrote.
        best_tokens: the two most probable tokens there.
        gap: between their logits, in float64.
    """

    position: int
    plain: int | None
    drafted: int | None
    best_tokens: tuple[int, int]
    gap: float

    def as_json(self) -> dict[str, Any]:
        """Return the difference as plain values; a tie is a gap that float32 may lose."""
        return {
            "position": self.position,
            "plain": self.plain,
            "drafted": self.drafted,
            "best_tokens": self.best_tokens,
            "gap": self.gap,
            "is_tie": self.gap < _TIE,
        }


def difference(
    language_model: LanguageModel, prompt: list[int], plain: list[int], drafted: list[int]
) -> Difference | None:
    """Return where two outputs of a prompt part, `None` where they are the same."""
    if plain == drafted:
        return None
    pairs = enumerate(zip(plain, drafted, strict=False))
    shorter = min(len(plain), len(drafted))
    position = next((at for at, (one, other) in pairs if one != other), shorter)
    tokens, gap = _best_two(language_model, [*prompt, *plain[:position]])
    ends = [output[position] if position < len(output) else None for output in (plain, drafted)]
    return Difference(position, ends[0], ends[1], tokens, gap)


def _best_two(language_model: LanguageModel, tokens: list[int]) -> tuple[tuple[int, int], float]:
    """Return the two most probable next tokens and the gap of their logits, in float64.

    Computed by a copy: captured graphs would miss weights that are converted and back.
    """
    model: Any = copy.deepcopy(language_model.model).to(torch.float64)  # type: ignore[arg-type]  # wrapped without its types
    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0, -1]
    values, indices = logits.topk(2)
    first, second = indices.tolist()
    return (first, second), float(values[0] - values[1])


def compare(
    language_model: LanguageModel, ways: dict[str, Contender], case: BenchPrompt, number: int
) -> dict[str, Any]:
    """Decode one prompt in both ways and return a line of the file."""
    runs = {name: ways[name](case.token_ids, remember=True) for name in _WAYS}
    plain, drafted = (runs[name].token_ids for name in _WAYS)
    found = difference(language_model, case.token_ids, plain, drafted)
    return {
        "prompt": number,
        "category": case.category,
        "num_prompt_tokens": len(case.token_ids),
        "num_tokens": len(plain),
        "num_passes": runs[FOREDRAFT].num_passes,
        "num_drafted": runs[FOREDRAFT].statistics.num_drafted,
        "output_ids": drafted,
        "difference": None if found is None else found.as_json(),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many outputs are identical, and the differences."""
    different = [row for row in rows if row["difference"] is not None]
    tokens, passes = (sum(row[name] for row in rows) for name in ("num_tokens", "num_passes"))
    return {
        "prompts": len(rows),
        "identical": len(rows) - len(different),
        "tokens": tokens,
        "passes": passes,
        "nodes_verified": sum(row["num_drafted"] for row in rows),
        "different": [
            {"prompt": row["prompt"], "category": row["category"], **row["difference"]}
            for row in different
        ],
    }


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
    asked = {name: head[name] for name in ("model", "dtype", "max_new_tokens", "prompts_sha256")}
    if not lines or any(lines[0].get(name) != value for name, value in asked.items()):
        raise ResumeError(f"{output} belongs to another run: it does not say {asked}")
    output.write_text(whole)
    return lines[1:]


def measure(  # noqa: PLR0913  options
    *,
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    output: Annotated[Path, typer.Option(help="JSON lines, written as it goes.")],
    model: Annotated[str, typer.Option(help="The model.")] = DEFAULT_MODEL,
    index: Annotated[list[Path] | None, typer.Option(help="Indexes to draft from.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each.")] = 64,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a file.")] = False,
) -> None:
    """Decode prompts in both ways and compare."""
    options = DrafterSettings(index=index or [])
    options.check()
    language_model = load_model(ModelOptions(model, precision=Precision.FLOAT32))
    head = {
        **circumstances(language_model),
        "drafter": options.describe(),
        "max_new_tokens": max_new_tokens,
        "prompts_sha256": sha256(prompts.read_bytes()).hexdigest(),
    }
    rows = _rows(output, head, resume=resume)
    with options.connect(language_model) as drafter:
        decoder = assemble(language_model, drafter)
        ways = contenders(language_model, decoder, max_new_tokens)
        cases = fitting(language_model, decoder.target, read_prompts(prompts, limit))
        todo = list(enumerate(cases))[len(rows) :]
        with output.open("a", encoding="utf-8") as file:
            for number, case in track(todo, "prompts", console=Console(stderr=True)):
                rows.append(compare(language_model, ways, case, number))
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
