"""Whether places are used, memory stays flat and nobody waits long where prompts queue for places.

    python -m benchmarks.decoding.full_places --prompts questions.jsonl --index my.index \
        --dtype bfloat16 --count 200 --parallel 8 --output FILE

Prompts of mixed lengths, and limits of their own, are decoded one by one and then with so many at a
time, by drafters that begin alike. Three things are reported of the latter. Places: in how many
passes one was free while prompts waited. Memory: that of the process after each tenth of the
prompts. Shares: with N places a sequence's fair share is one N-th of the machine, so the time that
it takes alone times N; its own time, from its admission to its end, is held against that, and what
passes of many gain is below 1. It is also held against what all take longer in the mean: 1 where
what is gained is shared evenly, too.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from numpy.typing import NDArray

from decoder.assembly import DrafterSettings
from decoder.budget.budget import MeasuredBudget
from decoder.budget.cost_store import known_costs
from decoder.commands.bench import circumstances
from decoder.commands.prompts import read_prompts
from decoder.drafters.following import states_of
from decoder.loop import Decoder, Request
from decoder.model.passes import Read, Reading
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from indexer.tokenizer import DEFAULT_MODEL

_MEMORY_SAMPLES: Final = 10


class WatchedTarget(Target):
    """A target that counts its passes."""

    def __init__(self, language_model: LanguageModel, states: Iterable[int]) -> None:
        self.num_passes = 0
        super().__init__(language_model.model, states=states)

    def read(self, readings: Sequence[Reading]) -> list[Read]:
        """See `Target`."""
        self.num_passes += 1
        return super().read(readings)


@dataclass(slots=True)
class Sitting:
    """What decoding a list of sequences showed.

    Attributes:
        seconds: of each, from its admission to its end.
        outputs: of each.
        num_passes: of all together.
        num_idle: passes during which a place was free though prompts waited.
        megabytes: resident memory of the process after each tenth of the sequences.
    """

    seconds: list[float]
    outputs: list[list[int]]
    num_passes: int = 0
    num_idle: int = 0
    megabytes: list[float] = field(default_factory=list)


def decoded(
    decoder: Decoder, target: WatchedTarget, requests: Sequence[Request], parallel: int
) -> Sitting:
    """Decode sequences, so many at a time, and watch."""
    target.forget()
    target.num_passes = 0
    began_s = [0.0] * len(requests)
    sitting = Sitting([0.0] * len(requests), [[] for _ in requests])
    num_begun = num_over = 0

    def admitted() -> Iterator[Request]:
        nonlocal num_begun
        for number, request in enumerate(requests):
            began_s[number] = time.perf_counter()
            num_begun += 1
            yield request

    for generation, tokens in decoder.generate_many(admitted(), parallel):
        number = generation.number
        sitting.outputs[number].extend(tokens)
        # All that was admitted holds its place while the tokens of a pass are given out.
        if target.num_passes > sitting.num_passes:
            sitting.num_passes = target.num_passes
            is_waiting = num_begun < len(requests)
            sitting.num_idle += is_waiting and num_begun - num_over < parallel
        if generation.is_over:
            sitting.seconds[number] = time.perf_counter() - began_s[number]
            num_over += 1
            if num_over * _MEMORY_SAMPLES % len(requests) < _MEMORY_SAMPLES:
                sitting.megabytes.append(resident_megabytes())
    return sitting


def resident_megabytes() -> float:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def longer(alone: Sequence[float], together: Sequence[float]) -> NDArray[np.float64]:
    """Return float64[n], how many times as long each sequence takes among others."""
    return np.asarray(together, np.float64) / np.asarray(alone, np.float64)


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Return the median, the 95th percentile and the most of some values."""
    return {
        "median": float(np.median(values)),
        "percentile_95": float(np.percentile(values, 95)),
        "most": float(values.max()),
    }


def mixed(
    prompts: Sequence[list[int]], count: int, most: int, rng: np.random.Generator
) -> list[Request]:
    """Return prompts in a shuffled order, with limits from a quarter of the most to the most."""
    chosen = rng.permutation(len(prompts))[:count]
    return [Request(prompts[at], int(rng.integers(most // 4, most + 1))) for at in chosen]


def sat(
    language_model: LanguageModel, index: Sequence[Path], requests: Sequence[Request], parallel: int
) -> Sitting:
    """Decode with a target and a drafter that begin anew, after a few sequences to warm both."""
    with DrafterSettings(index=list(index)).connect(language_model) as drafter:
        target = WatchedTarget(language_model, states_of(drafter))
        budget = MeasuredBudget(known_costs(target, language_model.model, None))
        decoder = Decoder(target, drafter, budget, stop_ids=language_model.stop_ids)
        decoded(decoder, target, requests[:parallel], parallel)
        return decoded(decoder, target, requests, parallel)


def main(  # noqa: PLR0913  options
    *,
    prompts: Annotated[Path, typer.Option(help="Recorded prompts, JSON Lines.")],
    index: Annotated[list[Path], typer.Option(help="Indexes to draft from.")],
    model: str = DEFAULT_MODEL,
    dtype: Precision = Precision.FLOAT32,
    parallel: Annotated[int, typer.Option(help="Sequences at a time.")] = 8,
    count: Annotated[int, typer.Option(help="Sequences in all.")] = 200,
    longest: Annotated[int, typer.Option(help="Most tokens of a prompt.")] = 1536,
    max_new_tokens: Annotated[int, typer.Option(help="Most of a sequence's limit.")] = 48,
    seed: int = 0,
    output: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Decode many prompts through a few places."""
    language_model = load_model(ModelOptions(model, precision=dtype))
    texts = [prompt.text for prompt in read_prompts(prompts)]
    encoded = [tokens for text in texts if len(tokens := language_model.encode(text)) <= longest]
    requests = mixed(encoded, count, max_new_tokens, np.random.default_rng(seed))
    alone = sat(language_model, index, requests, 1)
    together = sat(language_model, index, requests, parallel)
    times = longer(alone.seconds, together.seconds)
    mean = sum(together.seconds) / sum(alone.seconds)
    lengths = [len(request.prompt) for request in requests]
    report = {
        **circumstances(language_model),
        "parallel": parallel,
        "num_sequences": len(requests),
        "prompt_tokens": {"least": min(lengths), "mean": np.mean(lengths), "most": max(lengths)},
        "num_identical": sum(map(list.__eq__, alone.outputs, together.outputs)),
        "alone": {**asdict(alone), "outputs": None, "seconds": sum(alone.seconds)},
        "together": {**asdict(together), "outputs": None, "seconds": sum(together.seconds)},
        "over_fair_share": spread(times / parallel),
        "over_mean": spread(times / mean),
    }
    text = json.dumps(report, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
