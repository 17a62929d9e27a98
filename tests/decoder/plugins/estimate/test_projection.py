"""A projection against a count by hand, and against the decoding loop itself."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count

import numpy as np
import pytest

from decoder.budget.budget import FixedBudget
from decoder.budget.costs import CostSurface
from decoder.loop import Decoder
from decoder.model.target import Target
from decoder.plugins.contenders.drafting_rules import DraftingRule, drafting_rules
from decoder.plugins.estimate.cost_curve import CostCurve
from decoder.plugins.estimate.projection import PAYING, ProjectedOutcome, best_of, project
from decoder.plugins.estimate.token_log import LoggedRecord
from retriever.commands.factories import OWN
from retriever.drafter import Drafter
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.traces.traces import Trace
from retriever.tree import DraftTree, Source
from tests.decoder.decoding import ScriptedDrafter, prompt_of, tiny_llama

WIDTHS = (1, 2, 4, 8, 16, 32)
PLAIN_S = 0.25
TICK_S = 1 / 64
"""Powers of two, so that sums of seconds are exact."""


def record(prompt: list[int], output: list[int], kind: str = "all") -> LoggedRecord:
    return LoggedRecord(kind, Trace(np.array(prompt, np.int32), np.array(output, np.int32)))


def stepped_curve(batch: int = 1) -> CostCurve:
    """Each node costs an eighth of a plain pass, whatever the context."""
    seconds = tuple(PLAIN_S * (1 + (width - 1) / 8) for width in WIDTHS)
    return CostCurve(CostSurface((0,), WIDTHS, (seconds,)), "by hand", batch=batch)


def chain_of(tokens: list[int]) -> DraftTree:
    size = len(tokens)
    return DraftTree.checked(
        tokens, list(range(-1, size - 1)), np.full(size, 0.9), np.full(size, Source.CONTEXT)
    )


def rights(context: int) -> int:
    """How many of a scripted draft's first tokens are right behind so many tokens."""
    return context * 7 % 5


def scripted(records: list[LoggedRecord]) -> DraftingRule:
    """A rule whose chains of the asked length are right to a known depth, then wrong."""
    truths = [[*r.trace.prompt.tolist(), *r.trace.output.tolist()] for r in records]

    def guess(tokens: list[int], budget: int) -> DraftTree:
        truth = next(t for t in truths if t[: len(tokens)] == tokens)
        right = truth[len(tokens) :][: min(budget, rights(len(tokens)))]
        return chain_of([*right, *[99] * (budget - len(right))])

    return DraftingRule("scripted", lambda _: nullcontext(ScriptedDrafter(guess)))


def by_hand(records: list[LoggedRecord], budget: int, batch: int) -> tuple[int, int, float]:
    """Steps, drafts, and seconds of both: each call of the drafter takes a tick.

    For the last token none is asked, as in the loop.
    """
    steps, drafts, seconds = 0, 0, 0.0
    for each in records:
        done, total, prompt = 1, len(each.trace.output), len(each.trace.prompt)
        seconds += 2 * TICK_S * batch  # it is opened and closed
        while done < total:
            accepted = min(budget, rights(prompt + done), total - done - 1)
            is_drafted = done < total - 1
            seconds += PLAIN_S * (1 + is_drafted * budget / 8) + is_drafted * TICK_S * batch
            steps += 1
            drafts += is_drafted
            done += accepted + 1
    return steps, drafts, seconds


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("budget", [1, 3, 15])
def test_a_scripted_target_of_known_cost_is_projected_exactly(budget: int, batch: int) -> None:
    rng = np.random.default_rng(budget)
    records = [
        record(rng.integers(0, 90, size).tolist(), rng.integers(0, 90, 40 + size).tolist())
        for size in (3, 8, 13)
    ]
    ticks = count()
    outcomes = project(
        records,
        [scripted(records)],
        [0, budget],
        stepped_curve(batch),
        clock=lambda: next(ticks) * TICK_S,
    )
    plain, drafted = outcomes
    num_tokens = sum(len(each.trace.output) - 1 for each in records)
    steps, drafts, seconds = by_hand(records, budget, batch)
    assert (plain.tally().steps, plain.tally().seconds) == (num_tokens, num_tokens * PLAIN_S)
    assert drafted.tally().tokens == num_tokens
    assert drafted.tally().steps == steps
    assert drafted.tally().nodes == drafts * budget
    assert drafted.tally().seconds == seconds
    assert drafted.speedup(plain) == num_tokens * PLAIN_S / seconds


def test_kinds_add_up_and_have_speedups_of_their_own() -> None:
    records = [record([1, 2], list(range(10, 40)), "a"), record([3, 4], list(range(50, 90)), "b")]
    plain, drafted = project(records, [scripted(records)], [4], stepped_curve())
    parts = [drafted.tally(kind) for kind in ("a", "b")]
    assert [part.records for part in parts] == [1, 1]
    assert drafted.tally().steps == sum(part.steps for part in parts)
    assert drafted.tally().seconds == pytest.approx(sum(part.seconds for part in parts))
    assert plain.tally("a").tokens == 29
    assert drafted.speedup(plain, "a") != drafted.speedup(plain, "b")


def test_the_replay_counts_the_steps_that_the_decoding_loop_makes() -> None:
    """Each output of a real loop, recorded and replayed: the same drafts, the same steps."""
    embedded = EmbeddedDrafter()
    decoder = Decoder(Target(tiny_llama()), embedded, FixedBudget(8))
    records, steps, tokens = [], 0, 0
    for number in range(4):
        prompt = prompt_of(12, seed=number // 2)  # each twice: the second drafts from the first
        generation = decoder.generate(prompt, 48)
        records.append(record(prompt, [token for step in generation for token in step]))
        steps += generation.statistics.num_passes - 1
        tokens += generation.statistics.num_tokens - 1
    embedded.shut_down()
    own = [rule for rule in drafting_rules() if rule.name == OWN]
    _, drafted = project(records, own, [8], stepped_curve())
    assert (drafted.tally().steps, drafted.tally().tokens) == (steps, tokens)
    assert steps < tokens * 0.6


def test_cutting_to_what_pays_beats_every_fixed_budget_where_drafts_turn() -> None:
    """Records whose drafts are all right, and others whose drafts are all wrong."""
    repeating = [record([5, 6], [7, 8, 9, 10] * 40, "a") for _ in range(3)]
    rng = np.random.default_rng(1)
    random = [record([1, 2], rng.integers(0, 5000, 160).tolist(), "b") for _ in range(3)]
    rules = drafting_rules()[:1]
    ticks = count()
    plain, *drafted = project(
        [*repeating, *random],
        rules,
        [4, 16, 31, PAYING],
        stepped_curve(),
        clock=lambda: next(ticks) * 1e-6,
    )
    assert best_of(drafted, plain, OWN).nodes == PAYING
    assert drafted[-1].speedup(plain, "b") > 0.9


def test_each_way_begins_with_nothing_and_remembers_in_the_order_of_the_log() -> None:
    rng = np.random.default_rng(3)
    novel = rng.integers(0, 5000, 60).tolist()
    once = list(project([record([1], novel)], drafting_rules(), [8], stepped_curve()))
    twice = list(
        project(
            [record([1], novel, "a"), record([2], novel, "b")],
            drafting_rules(),
            [8],
            stepped_curve(),
        )
    )
    for alone, outcome in zip(once[1:], twice[1:], strict=True):
        assert alone.tally().steps == outcome.tally("a").steps > 50
        if outcome.drafter != "prompt-lookup":  # which knows its own sequence alone
            assert outcome.tally("b").steps < 15


def test_a_drafter_that_is_asked_for_nothing_is_told_all_tokens_later() -> None:
    """Where costs rule drafts out for a while, tokens are kept for the next draft or the close."""
    opened: list[ScriptedDrafter] = []

    @contextmanager
    def wrong(_max_nodes: int) -> Iterator[Drafter]:
        opened.append(ScriptedDrafter(lambda _, budget: chain_of([99] * budget)))
        yield opened[-1]

    output = list(range(80))
    clock = count()
    outcomes: list[ProjectedOutcome] = list(
        project(
            [record([5], output)],
            [DraftingRule("wrong", wrong)],
            [PAYING],
            stepped_curve(),
            clock=lambda: next(clock) * PLAIN_S,
        )
    )
    assert opened[0].num_drafts < 40
    assert opened[0].closed == [[5, *output]]
    assert outcomes[1].tally().tokens == 79
