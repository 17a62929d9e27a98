"""Drafts in `model.generate` of transformers, compared with its own prompt lookup.

    python -m benchmarks.engines.in_transformers --prompts questions.jsonl --output report.json

The same other prompts are answered first. Then every prompt is decoded greedily with every method,
in an order that rotates. Each of our methods has its own drafter, which stores its outputs. Prompt
lookup has two settings: the one with the fewest steps on these very prompts, and a fast one. The
former is found by replaying all settings on the outputs, which no setting changes, without running
the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.progress import track

from benchmarks.engines.engine_prompts import PromptSample, sample_prompts
from benchmarks.engines.engine_report import Way, Whose, as_markdown, circumstances, report, write
from benchmarks.engines.kept_answers import KeptRuns, kept_answers
from benchmarks.engines.lookup_settings import Lookup, tokens_per_step
from benchmarks.engines.transformers_runs import Contender, Engine
from decoder.assembly import draft_limits
from decoder.budget.budget import FixedBudget
from decoder.budget.cost_store import describe_machine, versions
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.recycling import RecycledLogits
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from indexer.tokenizer import DEFAULT_MODEL
from retriever.sessions.embedded import EmbeddedDrafter

LOOKUPS: Final = tuple(product((3, 10, 20, 40), (1, 2, 3, 5)))
NUM_NODES: Final = 32
PLAIN: Final = "plain"
PAYING: Final = "trees, as they pay"
FUSED: Final = f"trees of {NUM_NODES}, with recycled logits"
QUICK_LOOKUP: Final = (3, 2)
"""A setting with few tokens: if wide passes cost more time, it is faster than the setting with the
fewest steps."""
_WARM_UP: Final = "Count from one to ten."


@contextmanager
def contenders(
    language_model: LanguageModel,
    lookups: Sequence[Lookup],
    indexes: Sequence[Path],
    outputs_before: Callable[[str], Sequence[list[int]]],
) -> Iterator[list[Contender]]:
    """Open all methods during the block.

    Args:
        language_model: the model.
        lookups: settings of prompt lookup.
        indexes: indexes that our methods draft from.
        outputs_before: earlier outputs for each of our methods, by name.
    """
    with ExitStack() as opened:

        def warmed(name: str) -> EmbeddedDrafter:
            drafter = EmbeddedDrafter.open_indexes(indexes, vocabulary=language_model.vocabulary)
            opened.callback(drafter.shut_down)
            drafter.warm()
            for output in outputs_before(name):
                drafter.remember(output)
            return drafter

        yield [
            Contender(PLAIN, Whose.PLAIN),
            *map(_looking_up, lookups),
            _trees(PAYING, Foredraft(language_model.model, warmed(PAYING))),
            _trees(FUSED, _recycling(language_model, warmed(FUSED))),
        ]


def _looking_up(lookup: Lookup) -> Contender:
    settings = {"prompt_lookup_num_tokens": lookup[0], "max_matching_ngram_size": lookup[1]}
    return Contender(_name(lookup), Whose.ENGINE, settings)


def _name(lookup: Lookup) -> str:
    return f"prompt lookup, {lookup[0]} tokens after at most {lookup[1]}"


def _trees(name: str, foredraft: Foredraft) -> Contender:
    options = {"custom_generate": foredraft}
    return Contender(name, Whose.OURS, options=options)


def _recycling(language_model: LanguageModel, drafter: EmbeddedDrafter) -> Foredraft:
    fused = FusedDrafter([drafter], draft_limits(language_model), recycled=RecycledLogits())
    return Foredraft(language_model.model, fused, budget=FixedBudget(NUM_NODES))


def measure(
    engine: Engine, indexes: Sequence[Path], sample: PromptSample, kept: Path | None
) -> tuple[list[Way], dict[str, float]]:
    """Answer the warm-up prompts, then decode the others with every method.

    Returns:
        The runs of each method, and tokens per step of each setting of prompt lookup.
    """
    language_model = engine.language_model
    answers, outputs = _answered(engine, indexes, sample, kept)
    prompts = [language_model.encode(prompt.text) for prompt in sample.measured]
    lookups = tokens_per_step(LOOKUPS, prompts, outputs)
    best = max(LOOKUPS, key=lookups.__getitem__)
    runs = KeptRuns(None if kept is None else kept.with_suffix(".runs.json"))

    def before(name: str) -> list[list[int]]:
        return [*answers, *runs.outputs_of(name)]

    settings = dict.fromkeys((best, QUICK_LOOKUP))
    with contenders(language_model, list(settings), indexes, before) as ways:
        _in_turn(engine, ways, sample, runs)
        found = [
            Way(way.name, way.whose, [runs.done[each.text][way.name] for each in sample.measured])
            for way in ways
        ]
    return found, {_name(lookup): value for lookup, value in lookups.items()}


def _answered(
    engine: Engine, indexes: Sequence[Path], sample: PromptSample, kept: Path | None
) -> list[list[list[int]]]:
    """Return the answers to warm-up prompts, and the outputs to replay prompt lookup on."""
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
        first, done = number % len(ways), runs.done.get(prompt.text, {})
        for way in [*ways[first:], *ways[:first]]:
            if way.name not in done:
                runs.add(prompt.text, {way.name: engine.run(way, prompt.text)})


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
    """Measure the gain of drafts in `model.generate`."""
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
