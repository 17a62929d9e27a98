"""Which prompts an engine is measured with: the same for every engine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from decoder.commands.prompts import Prompt, read_prompts
from retriever.traces.traces import ChatEncoder, read_traces

TURNS: Final = "agent turns"
"""The category of prompts that are turns of agents."""


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


def sample_turns(
    path: Path, encoder: ChatEncoder, number: int, max_tokens: int
) -> list[tuple[Prompt, list[int]]]:
    """Take turns of recorded conversations, spread evenly over a file, to be answered again.

    Args:
        path: recordings; those with a prompt shorter than half of `max_tokens` are passed over.
        encoder: of the model that answers.
        number: of turns.
        max_tokens: of each prompt: its end, as a model with a short memory is given it.

    Returns:
        Pairs of what stands for the turn in a report, and its tokens.

    Raises:
        TraceError: the file cannot be read.
    """
    prompts = [trace.prompt for trace in read_traces(path, encoder)]
    long = [(at, each) for at, each in enumerate(prompts) if 2 * len(each) >= max_tokens]
    spread = [long[at * len(long) // number] for at in range(min(number, len(long)))]
    return [(Prompt(TURNS, "", at), prompt[-max_tokens:].tolist()) for at, prompt in spread]


def _distinct(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Leave out what stands in the file twice, under whatever category."""
    seen = set()
    for prompt in prompts:
        text = prompt.text.strip()
        if text not in seen:
            seen.add(text)
            yield prompt
