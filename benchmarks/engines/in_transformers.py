"""Drafts inside `model.generate` of transformers, beside its own prompt lookup.

    python -m benchmarks.engines.in_transformers --prompts questions.jsonl --output report.json

Every prompt is decoded greedily in every way, in an order that rotates, after the same other
prompts were answered; each of our ways has a drafter of its own, which remembers as it goes.
Prompt lookup has the settings with which it takes the fewest steps on these very prompts: all of
them are tried on the outputs, which no setting changes, without running the model.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import track
from transformers import GenerationConfig, GenerationMixin

from benchmarks.engines.answers import KeptRuns, kept_answers
from benchmarks.engines.prompt_lookup import Lookup, tokens_per_step
from benchmarks.engines.prompts import PromptSample, sample_prompts
from benchmarks.engines.report import Run, Way, Whose, as_markdown, circumstances, report, write
from decoder.assembly import draft_limits
from decoder.budget.budget import FixedBudget
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.recycling import RecycledLogits
from decoder.engines.transformers.assisted import assisted_generate
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.machine import describe_machine, versions
from decoder.models import LanguageModel, ModelOptions, Precision, load_model
from decoder.sampling.stated import without_own_settings
from indexer.tokenizer import DEFAULT_MODEL
from retriever.embedded import EmbeddedDrafter

LOOKUPS: Final = tuple(product((3, 10, 20, 40), (1, 2, 3, 5)))
NUM_CANDIDATES: Final = 20
NUM_NODES: Final = 32
_WARM_UP: Final = "Count from one to ten."


@dataclass(frozen=True, slots=True)
class Contender:
    """A way of decoding: `model.generate` with some options.

    Attributes:
        name: for people.
        whose: whose way it is.
        settings: of the generation config.
        options: of `model.generate`, beside that.
        num_passes: passes of the target so far; those of `Foredraft` go past the model's hooks.
    """

    name: str
    whose: Whose
    settings: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    num_passes: Callable[[], int] = lambda: 0


@dataclass(frozen=True, slots=True)
class Engine:
    """The model of all contenders.

    Attributes:
        language_model: it.
        max_new_tokens: most tokens for each prompt.
    """

    language_model: LanguageModel
    max_new_tokens: int

    def run(self, contender: Contender, text: str) -> Run:
        """Decode a prompt and count the passes of the target."""
        model, passes = self.language_model.model, [0]
        prompt = self.language_model.encode(text)
        counting = model.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
        before, start = contender.num_passes(), time.perf_counter()
        tokens = torch.tensor([prompt])
        with without_own_settings(model):
            output: Any = GenerationMixin.generate(
                model,  # type: ignore[arg-type]  # every causal model has the mixin
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=self._config(contender.settings),
                **contender.options,
            )
        seconds = time.perf_counter() - start
        counting.remove()
        num_steps = passes[0] + contender.num_passes() - before
        return Run(output[0, len(prompt) :].tolist(), num_steps, seconds)

    def _config(self, settings: dict[str, int]) -> GenerationConfig:
        stop_ids = list(self.language_model.stop_ids)
        return GenerationConfig(  # type: ignore[no-untyped-call]  # the library gives no types
            do_sample=False,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
            **settings,
        )


@contextmanager
def contenders(
    language_model: LanguageModel,
    lookup: Lookup,
    indexes: Sequence[Path],
    answers: Sequence[list[int]],
) -> Iterator[list[Contender]]:
    """Have all ways of decoding during the block, ours warmed with the same answers."""
    with ExitStack() as opened:

        def warmed() -> EmbeddedDrafter:
            drafter = EmbeddedDrafter.open_indexes(indexes, vocabulary=language_model.vocabulary)
            opened.callback(drafter.shut_down)
            drafter.warm()
            for answer in answers:
                drafter.remember(answer)
            return drafter

        yield [
            Contender("plain", Whose.PLAIN),
            _looking_up(*lookup),
            _chains(warmed()),
            _trees("trees, as they pay", Foredraft(language_model.model, warmed())),
            _trees(
                f"trees of {NUM_NODES}, with recycled logits", _recycling(language_model, warmed())
            ),
        ]


def _looking_up(num_tokens: int, longest: int) -> Contender:
    settings = {"prompt_lookup_num_tokens": num_tokens, "max_matching_ngram_size": longest}
    return Contender(_name((num_tokens, longest)), Whose.ENGINE, settings)


def _name(lookup: Lookup) -> str:
    return f"prompt lookup, {lookup[0]} tokens after at most {lookup[1]}"


def _chains(drafter: EmbeddedDrafter) -> Contender:
    options = {
        "custom_generate": assisted_generate,
        "drafter": drafter,
        "max_candidates": NUM_CANDIDATES,
    }
    return Contender(f"chains of {NUM_CANDIDATES}", Whose.OURS, options=options)


def _trees(name: str, foredraft: Foredraft) -> Contender:
    options = {"custom_generate": foredraft}
    return Contender(
        name,
        Whose.OURS,
        options=options,
        num_passes=lambda: foredraft.statistics.num_passes,
    )


def _recycling(language_model: LanguageModel, drafter: EmbeddedDrafter) -> Foredraft:
    fused = FusedDrafter([drafter], draft_limits(language_model), recycled=RecycledLogits())
    return Foredraft(language_model.model, fused, budget=FixedBudget(NUM_NODES))


def measure(
    engine: Engine, indexes: Sequence[Path], sample: PromptSample, kept: Path | None
) -> tuple[list[Way], dict[str, float]]:
    """Answer the prompts to warm with, then decode the others in every way.

    Returns:
        What each way did, and tokens per step of each setting of prompt lookup.
    """
    language_model = engine.language_model
    answers, outputs = _answered(engine, indexes, sample, kept)
    prompts = [language_model.encode(prompt.text) for prompt in sample.measured]
    lookups = tokens_per_step(LOOKUPS, prompts, outputs)
    best = max(LOOKUPS, key=lookups.__getitem__)
    runs = KeptRuns(None if kept is None else kept.with_suffix(".runs.json"))
    earlier = [next(iter(ways.values())).token_ids for ways in runs.done.values()]
    with contenders(language_model, best, indexes, [*answers, *earlier]) as ways:
        _in_turn(engine, ways, sample, runs)
        found = [
            Way(way.name, way.whose, [runs.done[each.text][way.name] for each in sample.measured])
            for way in ways
        ]
    return found, {_name(lookup): value for lookup, value in lookups.items()}


def _answered(
    engine: Engine, indexes: Sequence[Path], sample: PromptSample, kept: Path | None
) -> list[list[list[int]]]:
    """Return the answers to warm with, and those that prompt lookup's settings are tried on."""
    language_model = engine.language_model
    drafter = EmbeddedDrafter.open_indexes(indexes, vocabulary=language_model.vocabulary)
    quick = _trees("", _recycling(language_model, drafter))

    def answer(text: str) -> list[int]:
        return engine.run(quick, text).token_ids

    found = [kept_answers(kept, part, answer) for part in (sample.warm, sample.measured)]
    drafter.shut_down()
    return [[ids[: engine.max_new_tokens] for ids in part] for part in found]


def _in_turn(engine: Engine, ways: list[Contender], sample: PromptSample, runs: KeptRuns) -> None:
    for way in ways:
        engine.run(way, _WARM_UP)
    for number, prompt in enumerate(track(sample.measured, description="measuring")):
        if prompt.text not in runs.done:
            first = number % len(ways)
            order = [*ways[first:], *ways[:first]]
            runs.add(prompt.text, {way.name: engine.run(way, prompt.text) for way in order})


def main(  # noqa: PLR0913, PLR0917  as many as a command has
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    output: Annotated[Path, typer.Option(help="Where the figures go (JSON).")],
    index: Annotated[list[Path] | None, typer.Option(help="Index to draft from.")] = None,
    model: Annotated[str, typer.Option(help="The model.")] = DEFAULT_MODEL,
    per_category: Annotated[int, typer.Option(help="Prompts measured of each category.")] = 1,
    warm_per_category: Annotated[int, typer.Option(help="Others answered before.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens for each.")] = 64,
    answers: Annotated[Path | None, typer.Option(help="Keeps what is done, to go on with.")] = None,
) -> None:
    """Measure what drafts bring inside `model.generate`."""
    sample = sample_prompts(prompts, per_category, warm_per_category)
    language_model = load_model(ModelOptions(model, precision=Precision.FLOAT32))
    before = circumstances(
        "transformers",
        model=language_model.name,
        dtype=Precision.FLOAT32.value,
        max_new_tokens=max_new_tokens,
        num_warm=len(sample.warm),
        indexes=[path.name for path in index or []],
        versions=versions(),
        cpu=describe_machine(),
    )
    engine = Engine(language_model, max_new_tokens)
    ways, lookups = measure(engine, index or [], sample, answers)
    tried = {"lookup_tokens_per_step_by_replay": lookups}
    contents = {**before, **report(sample.measured, ways), **tried}
    write(output, contents)
    print(as_markdown(contents))


if __name__ == "__main__":
    typer.run(main)
