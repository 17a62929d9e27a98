"""What a head adds to a fused draft: the same prompts decoded with it and without, at equal nodes.

Both are the contenders of a benchmark, `foredraft` and `foredraft-tables`, at a fixed number of
nodes: so a head drafts at every pass, whether that pays or not, and what it costs is told apart.
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
"""At which a head is judged: from what pays on a CPU to the most that a draft holds."""

MAX_PROMPTS: Final = 8
MAX_NEW_TOKENS: Final = 48
"""So many prompts of so many tokens take a small model and two cores a minute or two."""

_MOST_SECONDS: Final = 30.0
"""At one number of nodes: large models decode fewer prompts."""

_NAMES: Final = (TABLES, FOREDRAFT)


@dataclass(frozen=True, slots=True)
class FusedGain:
    """What a head adds at one number of nodes.

    Attributes:
        nodes: most nodes of each draft.
        num_prompts: that were decoded.
        without: tokens of a pass after the prompt's without the head, with an interval.
        with_head: the same with it.
        ratio: of the two, paired by prompt, with an interval.
        draft_ms: median time of a draft with the head.
        pass_ms: median time of a pass of the target over such a draft.
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
        """The time of a draft as a share of that of a pass."""
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
"""Is told at how many nodes is decoded, how much of that is over, from 0 to 1, and a few words."""


def fused_gains(
    language_model: LanguageModel, drafts: DraftOptions, prompts: Sequence[TokenIds], told: Told
) -> list[FusedGain]:
    """Decode prompts greedily with a head and without, at each number of nodes.

    Each number begins with drafters that have seen nothing; they remember their answers to earlier
    prompts, as in use. What takes longer than half a minute goes on with fewer prompts.

    Args:
        language_model: the target.
        drafts: where drafts come from, the head among it.
        prompts: int32[n] each, at least one.
        told: is told of the progress.

    Raises:
        HeadFileError: the head cannot be read.
        HeadMismatchError: it was made for another model.
        IndexerError: an index cannot be opened or was built for another tokenizer.
        UnsupportedModelError: the model cannot be decoded here.
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
    """Decode a prompt, and note the times of all passes that verify a draft."""

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
