"""Outputs of many sequences in shared passes, beside those of `model.generate` one by one.

    python -m tests.oracles.parallel_exactness --prompts questions.jsonl --index my.index \
        --per-category 10 --parallel 1 --parallel 4 --parallel 8 --output FILE

In float32 and greedily each output must be that of `model.generate`, whatever shares its passes. So
prompts come in a shuffled order, with limits of their own, some stop at a token that their output
holds, and some are aborted in the middle: what there is of them must be the beginning of their
output. Drafts are those of retrieval and recycled logits, with a fixed number of nodes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from decoder.assembly import connect_drafter
from decoder.budget.budget import FixedBudget
from decoder.commands.prompts import read_prompts
from decoder.drafters.options import DraftOptions
from decoder.loop import Decoder, Request
from decoder.model.pretrained import LanguageModel, ModelOptions, load_model
from decoder.model.target import Target
from decoder.plugins.bench.bench import circumstances
from decoder.plugins.contenders.contender import LibraryContender
from indexer.tokenizer import DEFAULT_MODEL

_ABORTED: Final = 0.1
"""Share of the sequences that are aborted."""

_STOPPED: Final = 0.3
"""Share of the sequences that stop at a token of their output."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence and how it is to end.

    Attributes:
        prompt: its tokens.
        output: what `model.generate` writes.
        limit: most new tokens.
        stop: tokens after which it stops by a rule; `None` to go on.
        is_aborted: whether the caller ends it after its third pass.
    """

    prompt: list[int]
    output: list[int]
    limit: int
    stop: int | None
    is_aborted: bool

    @property
    def expected(self) -> list[int]:
        """The whole output as it is to end."""
        return self.output[: min(self.limit, self.stop or self.limit)]


class StopAfter:
    """Stops a sequence after so many tokens: a `StopRule`."""

    def __init__(self, count: int) -> None:
        self._left = count

    def num_kept(self, tokens: Sequence[int]) -> int | None:
        """See `StopRule`."""
        kept = self._left if len(tokens) >= self._left else None
        self._left -= len(tokens)
        return kept


@dataclass(slots=True)
class Found:
    """What became of the sequences at one width.

    Attributes:
        parallel: sequences at a time.
        num_identical: outputs that are those of `model.generate`, to where they end.
        num_different: others.
        num_aborted: of the identical ones, those that were aborted.
        tokens_per_pass: of all sequences, their own token included.
    """

    parallel: int
    num_identical: int = 0
    num_different: int = 0
    num_aborted: int = 0
    tokens_per_pass: float = 0.0


def endings(
    prompts: Sequence[list[int]], outputs: Sequence[list[int]], rng: np.random.Generator
) -> list[Wanted]:
    """Give each sequence an ending of its own."""
    wanted = []
    for prompt, output in zip(prompts, outputs, strict=True):
        most = max(len(output), 1)
        limit = int(rng.integers(max(most // 2, 1), most + 1))
        stop = int(rng.integers(1, most + 1)) if rng.random() < _STOPPED else None
        wanted.append(Wanted(prompt, output, limit, stop, bool(rng.random() < _ABORTED)))
    return wanted


def check(decoder: Decoder, wanted: Sequence[Wanted], parallel: int) -> Found:
    """Decode sequences together, and compare each output with its own."""
    decoder.target.forget()
    found = Found(parallel)
    requests = [
        Request(
            each.prompt,
            each.limit,
            stop_rule=None if each.stop is None else StopAfter(each.stop),
        )
        for each in wanted
    ]
    outputs: dict[int, list[int]] = {}
    num_passes = num_tokens = 0
    for generation, tokens in decoder.generate_many(requests, parallel):
        number = generation.number
        output = outputs.setdefault(number, [])
        output.extend(tokens)
        if wanted[number].is_aborted and generation.statistics.num_passes >= 3:
            generation.stop()
        if not generation.is_over:
            continue
        expected = wanted[number].expected
        is_aborted = wanted[number].is_aborted
        is_same = output == (expected[: len(output)] if is_aborted else expected)
        found.num_identical += is_same
        found.num_different += not is_same
        found.num_aborted += is_same and is_aborted
        num_passes += generation.statistics.num_passes
        num_tokens += generation.statistics.num_tokens
    found.tokens_per_pass = num_tokens / num_passes
    return found


def plain_outputs(
    language_model: LanguageModel, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[list[int]]:
    """Return what `model.generate` writes for each prompt."""
    target = Target(language_model.model)
    contender = LibraryContender(language_model, target, max_new_tokens)
    outputs = []
    for number, prompt in enumerate(prompts, 1):
        outputs.append(contender([prompt], remember=False).token_ids)
        typer.echo(f"{number} of {len(prompts)} plain outputs", err=True)
    return outputs


def main(  # noqa: PLR0913  options
    *,
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    index: Annotated[list[Path], typer.Option(help="Indexes to draft from.")],
    model: str = DEFAULT_MODEL,
    per_category: Annotated[int, typer.Option(help="Prompts of each category.")] = 10,
    parallel: Annotated[list[int], typer.Option(help="Sequences at a time.")] = [1, 4, 8],  # noqa: B006
    nodes: Annotated[int, typer.Option(help="Nodes of each draft.")] = 8,
    max_new_tokens: int = 32,
    seed: int = 0,
    output: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Compare outputs; the status is 1 if any differs."""
    language_model = load_model(ModelOptions(model))
    chosen = read_prompts(prompts, per_category=per_category)
    encoded = [language_model.encode(prompt.text) for prompt in chosen]
    rng = np.random.default_rng(seed)
    outputs = plain_outputs(language_model, encoded, max_new_tokens)
    report: dict[str, Any] = {**circumstances(language_model), "num_prompts": len(encoded)}
    results = []
    for width in parallel:
        wanted = endings(encoded, outputs, rng)
        order = rng.permutation(len(wanted))
        with connect_drafter(DraftOptions(index=index), language_model) as drafter:
            target = Target(language_model.model)
            decoder = Decoder(target, drafter, FixedBudget(nodes), stop_ids=language_model.stop_ids)
            results.append(check(decoder, [wanted[at] for at in order], width))
        typer.echo(json.dumps(asdict(results[-1])), err=True)
    report["widths"] = [asdict(each) for each in results]
    text = json.dumps(report, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    typer.echo(text)
    if any(each.num_different for each in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
