"""The prompts for measuring engines, which are the same for every engine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from decoder.commands.prompts import Prompt, read_prompts
from retriever.traces.traces import ChatEncoder, read_traces

TURNS: Final = "agent turns"
"""Category of the prompts from agents' conversations."""


@dataclass(frozen=True, slots=True)
class PromptSample:
    """Prompts of one file; no prompt is in both parts.

    Attributes:
        warm: prompts to answer before the measurement, which gives drafters answers to draft from.
        measured: prompts to measure, of the same categories.
    """

    warm: list[Prompt]
    measured: list[Prompt]


def sample_prompts(path: Path, per_category: int, warm_per_category: int) -> PromptSample:
    """Take the first prompts of each category to measure, and the prompts after them to warm up.

    Args:
        path: Spec-Bench's questions; see `decoder.commands.prompts.read_prompts`.
        per_category: most prompts to measure in each category.
        warm_per_category: most prompts to answer first in each category.

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


def sample_turns(
    path: Path, encoder: ChatEncoder, number: int, max_tokens: int
) -> list[tuple[Prompt, list[int]]]:
    """Select turns of recorded conversations, spread evenly over a file, to answer again.

    Args:
        path: file of recordings; prompts shorter than half of `max_tokens` are left out.
        encoder: encoder of the model that answers.
        number: number of turns.
        max_tokens: most tokens of a prompt; a longer prompt keeps only its end.

    Returns:
        Pairs of the turn's name in a report and the tokens of its prompt.

    Raises:
        TraceError: the file cannot be read.
    """
    prompts = [trace.prompt for trace in read_traces(path, encoder)]
    long = [(at, each) for at, each in enumerate(prompts) if 2 * len(each) >= max_tokens]
    spread = [long[at * len(long) // number] for at in range(min(number, len(long)))]
    return [(Prompt(TURNS, "", at), prompt[-max_tokens:].tolist()) for at, prompt in spread]


def _distinct(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Leave out prompts that the file repeats, in any category."""
    seen = set()
    for prompt in prompts:
        text = prompt.text.strip()
        if text not in seen:
            seen.add(text)
            yield prompt
