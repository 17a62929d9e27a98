"""What a comparison of ways of decoding amounts to, in figures."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from decoder.contenders import FOREDRAFT, PLAIN, PROMPT_LOOKUP, UNDRAFTED, Run
from decoder.statistics import Statistics


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt decoded in every way.

    Attributes:
        category: the prompt's.
        runs: contender's name to what it did.
    """

    category: str
    runs: dict[str, Run]

    def speedup(self, over: str) -> float:
        """Return how many times as fast per token this decoder was as another way."""
        return _seconds_per_token([self.runs[over]]) / _seconds_per_token([self.runs[FOREDRAFT]])


def summarize(comparisons: list[Comparison]) -> dict[str, Any]:
    """Return the figures of all prompts (`overall`) and of each category (`categories`)."""
    categories: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        categories.setdefault(comparison.category, []).append(comparison)
    return {
        "overall": _figures(comparisons),
        "categories": {name: _figures(members) for name, members in categories.items()},
    }


def time_per_step(drafted: Statistics, undrafted: Statistics) -> dict[str, Any]:
    """Return where the time of a step goes, the prompt's pass left out.

    Args:
        drafted: of decoding with drafts.
        undrafted: of the same loop without; its step is what shares are of.

    Returns:
        Milliseconds a step of target, draft and host, each also as a share of a plain step;
        empty where a prompt's pass was all there was.
    """
    steps, plain_steps = drafted.widths.total(), undrafted.widths.total()
    if not steps or not plain_steps:
        return {}
    plain_s = (undrafted.total_s - undrafted.prompt_s) / plain_steps
    parts = {
        "target": drafted.target_s - drafted.prompt_s,
        "draft": drafted.draft_s,
        "host": drafted.host_s,
    }
    return {
        "plain_step_ms": plain_s * 1e3,
        "ms": {name: seconds / steps * 1e3 for name, seconds in parts.items()},
        "share_of_plain_step": {name: seconds / steps / plain_s for name, seconds in parts.items()},
    }


def _figures(comparisons: list[Comparison]) -> dict[str, Any]:
    """Return one category's figures; ratios are of seconds per token, sums over sums."""
    runs = {name: [c.runs[name] for c in comparisons] for name in comparisons[0].runs}
    pace = {name: _seconds_per_token(members) for name, members in runs.items()}
    others = (PLAIN, PROMPT_LOOKUP, UNDRAFTED)
    drafted, undrafted = _total(runs[FOREDRAFT]), _total(runs[UNDRAFTED])
    return {
        "num_prompts": len(comparisons),
        **{f"speedup_over_{name}": pace[name] / pace[FOREDRAFT] for name in others},
        **{f"median_speedup_over_{x}": median(c.speedup(x) for c in comparisons) for x in others},
        "prompt_lookup_speedup_over_plain": pace[PLAIN] / pace[PROMPT_LOOKUP],
        "mean_accepted_tokens": _tokens_per_pass(runs[FOREDRAFT]),
        "prompt_lookup_mean_accepted_tokens": _tokens_per_pass(runs[PROMPT_LOOKUP]),
        "identical": _num_identical(runs[FOREDRAFT], runs[PLAIN]),
        "undrafted_identical": _num_identical(runs[UNDRAFTED], runs[PLAIN]),
        "prompt_lookup_identical": _num_identical(runs[PROMPT_LOOKUP], runs[PLAIN]),
        "tokens_per_second": {name: 1 / seconds for name, seconds in pace.items()},
        "num_tokens": {name: _num_tokens(members) for name, members in runs.items()},
        "num_passes": {name: sum(r.num_passes for r in members) for name, members in runs.items()},
        "time_per_step": time_per_step(drafted, undrafted),
        "foredraft": drafted.report(),
    }


def _total(runs: list[Run]) -> Statistics:
    total = Statistics()
    for run in runs:
        total.add(run.statistics)
    return total


def _num_tokens(runs: list[Run]) -> int:
    return sum(len(run.token_ids) for run in runs)


def _seconds_per_token(runs: list[Run]) -> float:
    return sum(run.seconds for run in runs) / _num_tokens(runs)


def _tokens_per_pass(runs: list[Run]) -> float:
    return _num_tokens(runs) / sum(run.num_passes for run in runs)


def _num_identical(runs: list[Run], plain: list[Run]) -> int:
    pairs = zip(runs, plain, strict=True)
    return sum(run.token_ids == reference.token_ids for run, reference in pairs)
