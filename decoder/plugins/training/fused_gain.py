"""The gain of a head in fused drafts: the same prompts are decoded with the head and without it.

Both runs are contenders of the benchmark, `foredraft` and `foredraft-tables`, with the same fixed
number of nodes. So the head drafts at every pass, even if that does not pay off. Its cost is
reported separately.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from decoder.drafters.options import DraftOptions
from decoder.model.pretrained import LanguageModel
from decoder.observation import ObservedPass, Times, counted
from decoder.plugins.contenders.contender import FOREDRAFT, OwnContender, Run
from decoder.plugins.contenders.registry import TABLES, Contest, Lineup, Setting
from decoder.plugins.contenders.standings import Comparison, Interval, standings
from retriever.drafter import TokenIds

NODES: Final = (5, 16, 32, 64)
"""Numbers of nodes in the comparison: from the number that pays off on a CPU to the most in a
draft."""

MAX_PROMPTS: Final = 8
MAX_NEW_TOKENS: Final = 48
"""Tokens per prompt: a small model on two cores then takes a minute or two for all prompts."""

_MOST_SECONDS: Final = 30.0
"""Longest time at one number of nodes; large models decode fewer prompts in it."""

_NAMES: Final = (TABLES, FOREDRAFT)


@dataclass(frozen=True, slots=True)
class FusedGain:
    """The gain of a head at one number of nodes.

    Attributes:
        nodes: largest number of nodes in a draft.
        num_prompts: number of decoded prompts.
        without: tokens per pass without the head, with an interval; prompt passes do not count.
        with_head: tokens per pass with the head, with an interval.
        ratio: ratio of the two, paired by prompt, with an interval.
        draft_ms: median milliseconds of a draft with the head.
        pass_ms: median milliseconds of a target pass that verifies such a draft.
    """

    nodes: int
    num_prompts: int
    without: Interval
    with_head: Interval
    ratio: Interval
    draft_ms: float
    pass_ms: float

    @property
    def draft_share(self) -> float:
        """The time of a draft divided by the time of a pass."""
        return self.draft_ms / self.pass_ms if self.pass_ms else 0.0

    def report(self) -> dict[str, Any]:
        """Return figures as plain values."""
        return {
            "nodes": self.nodes,
            "prompts": self.num_prompts,
            "tokens_per_pass_without": self.without,
            "tokens_per_pass_with": self.with_head,
            "ratio": self.ratio,
            "draft_ms": self.draft_ms,
            "pass_ms": self.pass_ms,
            "draft_share_of_pass": self.draft_share,
        }


Told = Callable[[int, float, str], object]
"""Called with the number of nodes, the finished share of its run, from 0 to 1, and a short text."""


def fused_gains(
    language_model: LanguageModel, drafts: DraftOptions, prompts: Sequence[TokenIds], told: Told
) -> list[FusedGain]:
    """Decode prompts greedily with a head and without it, at each number of nodes.

    At each number of nodes, the drafters start without any text. As in normal use, they then
    remember their outputs for earlier prompts. After half a minute, the remaining prompts are left
    out.

    Args:
        language_model: the target.
        drafts: sources of drafts, including the head.
        prompts: int32[n] each, at least one prompt.
        told: called with the progress.

    Raises:
        HeadFileError: the head cannot be read.
        HeadMismatchError: the head was made for another model.
        IndexerError: an index cannot be opened or was built for another tokenizer.
        UnsupportedModelError: the model cannot be decoded with drafts.
    """
    contest = Contest(language_model, _NAMES, drafts, MAX_NEW_TOKENS)
    gains = []
    for nodes in NODES:
        with contest.opened(Setting(nodes)) as lineup:
            gains.append(_gain(nodes, lineup, prompts, told))
    return gains


def _gain(nodes: int, lineup: Lineup, prompts: Sequence[TokenIds], told: Told) -> FusedGain:
    comparisons, times = list[Comparison](), list[Times]()
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        order = _NAMES if number % 2 else _NAMES[::-1]
        seen: dict[str, list[Times]] = {name: [] for name in order}
        runs = {name: _decoded(lineup.drafting[name], prompt, seen[name]) for name in order}
        comparisons.append(Comparison("", {name: runs[name] for name in _NAMES}, number))
        times += seen[FOREDRAFT]
        told(nodes, (number + 1) / len(prompts), counted(number + 1, "prompt"))
        if time.perf_counter() - start > _MOST_SECONDS:
            break
    found = standings(comparisons, TABLES)
    figures = found["contenders"]
    return FusedGain(
        nodes,
        len(comparisons),
        figures[TABLES]["accepted_tokens"],
        figures[FOREDRAFT]["accepted_tokens"],
        found["against"][FOREDRAFT][TABLES]["accepted_tokens"],
        _median_ms([each.draft_s for each in times]),
        _median_ms([each.target_s for each in times]),
    )


def _decoded(way: OwnContender, prompt: TokenIds, times: list[Times]) -> Run:
    """Decode a prompt, and append the times of all passes that verify a draft."""

    def observe(seen: ObservedPass) -> None:
        if len(seen.tree):
            times.append(seen.times)

    start = time.perf_counter()
    generation = way.decoder.generate(prompt, way.max_new_tokens, observer=observe)
    tokens = [token for step in generation for token in step]
    statistics = generation.statistics
    return Run(tokens, time.perf_counter() - start, statistics.num_passes, statistics)


def _median_ms(seconds: Sequence[float]) -> float:
    return median(seconds) * 1e3 if seconds else 0.0
