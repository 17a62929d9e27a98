"""Which prompts an engine is measured with: the same for every engine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from decoder.commands.prompts import Prompt, read_prompts


@dataclass(frozen=True, slots=True)
class PromptSample:
    """Prompts of one file; none is in both parts.

    Attributes:
        warm: answered before anything is measured, so that there are answers to draft from.
        measured: of the same categories.
    """

    warm: list[Prompt]
    measured: list[Prompt]


def sample_prompts(path: Path, per_category: int, warm_per_category: int) -> PromptSample:
    """Take the first prompts of each category to measure, and those behind them to warm with.

    Args:
        path: Spec-Bench's questions; see `decoder.commands.prompts.read_prompts`.
        per_category: most prompts measured of each category.
        warm_per_category: most prompts of each that are answered before.

    Raises:
        PromptFileError: the file cannot be read.
    """
    prompts = _distinct(read_prompts(path))
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    end = per_category + warm_per_category
    return PromptSample(
        list(chain.from_iterable(each[per_category:end] for each in categories.values())),
        list(chain.from_iterable(each[:per_category] for each in categories.values())),
    )


def _distinct(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Leave out what stands in the file twice, under whatever category."""
    seen = set()
    for prompt in prompts:
        text = prompt.text.strip()
        if text not in seen:
            seen.add(text)
            yield prompt
