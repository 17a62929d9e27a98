"""Tokens a second with many sequences in a pass: this loop with drafts and without, and padding.

    python -m benchmarks.decoding.parallel --prompts questions.jsonl --index my.index \
        --dtype bfloat16 --parallel 1 --parallel 4 --output FILE

Decodes the same prompts at each width, a batch at a time in turn by every contender, so that all
share what the machine does: this package's loop with drafts, the same loop and target without any,
and `model.generate` of transformers with batches that are padded on the left. Drafters of each
width begin anew and remember the same earlier answers. Times are those of whole batches, prompts
included; a batch has as many prompts as several times its width, so that places are filled again.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import torch
import typer
from transformers import GenerationConfig, GenerationMixin

from decoder.assembly import DrafterSettings
from decoder.budget.budget import FixedBudget, MeasuredBudget
from decoder.budget.cost_store import known_costs
from decoder.commands.bench import circumstances
from decoder.commands.prompts import read_prompts
from decoder.drafters.following import NoDrafter, states_of
from decoder.loop import Decoder, Request
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from decoder.sampling.stated import without_own_settings
from indexer.tokenizer import DEFAULT_MODEL

DRAFTED: Final = "drafted"
UNDRAFTED: Final = "undrafted"
PADDED: Final = "transformers, padded"

Decode = Callable[[Sequence[list[int]]], list[list[int]]]


@dataclass(slots=True)
class Tally:
    """What a contender decoded, batch by batch.

    Attributes:
        tokens: of each batch.
        seconds: of each batch.
        num_passes: of the sequences, where that is known.
    """

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        """Tokens for each second."""
        return sum(self.tokens) / sum(self.seconds)


def in_one_loop(decoder: Decoder, parallel: int, max_new_tokens: int) -> Decode:
    """Return a contender of this package."""

    def decode(prompts: Sequence[list[int]]) -> list[list[int]]:
        decoder.target.forget()
        outputs: list[list[int]] = [[] for _ in prompts]
        requests = [Request(prompt, max_new_tokens) for prompt in prompts]
        for generation, tokens in decoder.generate_many(requests, parallel):
            outputs[generation.number].extend(tokens)
        return outputs

    return decode


def padded(language_model: LanguageModel, parallel: int, max_new_tokens: int) -> Decode:
    """Return transformers' own batches: as many prompts at a time, padded on the left."""
    model, stop_ids = language_model.model, list(language_model.stop_ids)
    padding = stop_ids[0] if stop_ids else 0
    config = GenerationConfig(  # type: ignore[no-untyped-call]  # the library gives no types
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_ids or None,
        pad_token_id=padding,
    )

    def decode(prompts: Sequence[list[int]]) -> list[list[int]]:
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), parallel):
            batch = prompts[start : start + parallel]
            longest = max(map(len, batch))
            tokens = torch.tensor([[padding] * (longest - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
            with without_own_settings(model):
                output: Any = GenerationMixin.generate(
                    model,  # type: ignore[arg-type]  # every causal model has the mixin
                    tokens,
                    attention_mask=mask,
                    generation_config=config,
                )
            outputs += [_ended(row, stop_ids) for row in output[:, longest:].tolist()]
        return outputs

    return decode


def _ended(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """Return the tokens up to the first stop; what follows is padding."""
    end = next((at for at, token in enumerate(tokens, 1) if token in stop_ids), None)
    return tokens[:end]


def compare(
    contenders: dict[str, Decode], batches: Sequence[Sequence[list[int]]]
) -> tuple[dict[str, Tally], int]:
    """Decode each batch by every contender in turn; return their tallies.

    Returns:
        The tallies, and how many outputs differ between the first two contenders: in half
        precision some do, as passes of other widths round differently.
    """
    tallies = {name: Tally() for name in contenders}
    num_different = 0
    for number, batch in enumerate(batches):
        names = list(contenders)
        turn = number % len(names)
        outputs = {}
        for name in names[turn:] + names[:turn]:
            began_s = time.perf_counter()
            outputs[name] = contenders[name](batch)
            tallies[name].seconds.append(time.perf_counter() - began_s)
            tallies[name].tokens.append(sum(map(len, outputs[name])))
        one, other = (outputs[name] for name in names[:2])
        num_different += sum(a != b for a, b in zip(one, other, strict=True))
    return tallies, num_different


def ratio(tallies: dict[str, Tally], over: str) -> float:
    """Return the median, over batches, of drafted speed over another's."""
    return median(
        (tokens / seconds) / (other_tokens / other_seconds)
        for tokens, seconds, other_tokens, other_seconds in zip(
            tallies[DRAFTED].tokens,
            tallies[DRAFTED].seconds,
            tallies[over].tokens,
            tallies[over].seconds,
            strict=True,
        )
    )


def main(  # noqa: PLR0913  options
    *,
    prompts: Annotated[Path, typer.Option(help="Recorded prompts, JSON Lines.")],
    index: Annotated[list[Path], typer.Option(help="Indexes to draft from.")],
    model: str = DEFAULT_MODEL,
    dtype: Precision = Precision.FLOAT32,
    parallel: Annotated[list[int], typer.Option(help="Sequences at a time.")] = [1, 2, 4, 8, 16],  # noqa: B006
    count: Annotated[int, typer.Option(help="Prompts to measure at each width.")] = 48,
    warm: Annotated[int, typer.Option(help="Prompts answered before.")] = 60,
    longest: Annotated[int, typer.Option(help="Most tokens of a prompt.")] = 512,
    max_new_tokens: int = 64,
    batches: Annotated[int, typer.Option(help="Parts that contenders take turns in.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Compare tokens a second at several widths."""
    language_model = load_model(ModelOptions(model, precision=dtype))
    texts = [prompt.text for prompt in read_prompts(prompts)]
    encoded = [tokens for text in texts if len(tokens := language_model.encode(text)) <= longest]
    measured, earlier = encoded[:count], encoded[count : count + warm]
    settings = DrafterSettings(index=index)
    report = {**circumstances(language_model), "num_prompts": len(measured), "widths": []}
    for width in parallel:
        with settings.connect(language_model) as drafter:
            target = Target(language_model.model, states=states_of(drafter))
            budget = MeasuredBudget(known_costs(target, language_model.model, None))
            stops = language_model.stop_ids
            drafted = Decoder(target, drafter, budget, stop_ids=stops)
            undrafted = Decoder(target, NoDrafter(), FixedBudget(0), stop_ids=stops)
            contenders = {
                DRAFTED: in_one_loop(drafted, width, max_new_tokens),
                UNDRAFTED: in_one_loop(undrafted, width, max_new_tokens),
                PADDED: padded(language_model, width, max_new_tokens),
            }
            contenders[DRAFTED](earlier)
            contenders[UNDRAFTED](earlier[:width])
            contenders[PADDED](earlier[:width])
            step = -(-len(measured) // batches)
            parts = [measured[start : start + step] for start in range(0, len(measured), step)]
            tallies, num_different = compare(contenders, parts)
        found = {
            "parallel": width,
            "tokens_per_second": {name: tally.per_second for name, tally in tallies.items()},
            "over_undrafted": ratio(tallies, UNDRAFTED),
            "over_padded": ratio(tallies, PADDED),
            "num_different": num_different,
        }
        report["widths"].append(found)
        typer.echo(json.dumps(found), err=True)
    text = json.dumps(report, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
