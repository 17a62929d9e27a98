"""Drafts stay as good as they are: floors on recordings that are made here."""

import re
import textwrap

import numpy as np

from retriever.plugins.replay.replay import replay
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.traces.traces import Trace

SOURCE = textwrap.__file__


def words(text: str) -> list[str]:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def edited_file(seed: int) -> Trace:
    """A module of the standard library, and the same with one in sixteen lines changed."""
    rng = np.random.default_rng(seed)
    with open(SOURCE, encoding="utf-8") as file:  # noqa: PTH123  (a module's path is a string)
        lines = file.read().splitlines(keepends=True)
    changed = [
        f"    changed_{rng.integers(9)} = {rng.integers(99)}\n" if rng.random() < 1 / 16 else line
        for line in lines
    ]
    vocabulary: dict[str, int] = {}
    ids = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in words("".join(text))]
        for text in (lines, changed)
    ]
    return Trace(np.array(ids[0], np.int32), np.array(ids[1], np.int32))


def prompt_lookup_steps(trace: Trace, num_tokens: int) -> int:
    """Steps that transformers' rule takes: the first earlier match of the last two tokens."""
    sequence = [*trace.prompt.tolist(), *trace.output.tolist()]
    done, steps = len(trace.prompt), 0
    while done < len(sequence):
        end = sequence[done - 2 : done]
        hits = (p for p in range(done - 2) if sequence[p : p + 2] == end)
        accepted = 0
        if (hit := next(hits, None)) is not None:
            guess = sequence[hit + 2 : done][:num_tokens]
            while (
                accepted < len(guess)
                and guess[accepted : accepted + 1]
                == (sequence[done + accepted : done + accepted + 1])
            ):
                accepted += 1
        done, steps = done + accepted + 1, steps + 1
    return steps


def test_rewritten_file_is_copied_on_past_its_edits() -> None:
    traces = [edited_file(seed) for seed in range(3)]
    lookup = sum(prompt_lookup_steps(trace, 64) for trace in traces)
    report = replay(EmbeddedDrafter(), traces[:1], 64)
    assert report.tokens / report.steps > 20
    steps = sum(replay(EmbeddedDrafter(), [trace], 64).steps for trace in traces)
    assert steps < lookup / 1.5


def test_recurring_answers_are_drafted_from_generations() -> None:
    """Answers from a template, of which one in eight words differs."""
    rng = np.random.default_rng(3)
    template = rng.integers(0, 200, 80)
    answers = [
        np.where(rng.random(80) < 1 / 8, rng.integers(200, 900, 80), template) for _ in "x" * 20
    ]
    traces = [Trace(np.array([901], np.int32), answer.astype(np.int32)) for answer in answers]
    report = replay(EmbeddedDrafter(), traces, 16)
    assert report.tokens / report.steps > 2
