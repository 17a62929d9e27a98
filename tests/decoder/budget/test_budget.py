import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, strategies as st

from decoder.budget.budget import FixedBudget, Load, MeasuredBudget, PassOutcome
from decoder.budget.costs import AdaptiveCosts, CostSurface
from retriever.tree import ROOT, DraftTree, Source

WIDTHS = (1, 2, 4, 8, 16, 32)
CHEAP = CostSurface.flat((1, 2, 4), (1.0, 1.2, 1.6))
DEAR = CostSurface.flat((1, 2, 4, 8, 16, 32), (1.0, 1.6, 1.6, 1.8, 2.3, 3.5))
MISS = -1

Guess = tuple[DraftTree, int]
"""A step's draft, and how many nodes of its one path the target agrees with."""


def tree_with(probabilities: list[float]) -> DraftTree:
    count = len(probabilities)
    return DraftTree.checked(
        np.arange(count),
        np.full(count, ROOT),
        sorted(probabilities, reverse=True),
        np.full(count, Source.CORPUS),
    )


def chain_of(probabilities: list[float]) -> DraftTree:
    count = len(probabilities)
    return DraftTree.checked(
        np.arange(count), np.arange(-1, count - 1), probabilities, np.full(count, Source.CONTEXT)
    )


def first_cut(surface: CostSurface, tree: DraftTree) -> DraftTree:
    return MeasuredBudget(surface).share([tree], Load.of(0), 0.0)[0]


def cost(surface: CostSurface, width: int) -> float:
    """Interpolate the slow way: the dearest narrower point bounds every measured one."""
    (seconds,) = surface.seconds
    dearest = [max(seconds[: at + 1]) for at in range(len(seconds))]
    for at, (low, high) in enumerate(zip(surface.widths, surface.widths[1:], strict=False)):
        if low <= width <= high:
            share = (width - low) / (high - low)
            return dearest[at] + share * (dearest[at + 1] - dearest[at])
    raise AssertionError(width)


def rate(surface: CostSurface, tree: DraftTree, num_nodes: int) -> float:
    expected = 1.0 + float(tree.probabilities[:num_nodes].astype(float).sum())
    return expected / cost(surface, num_nodes + 1)


@given(
    st.lists(st.floats(0.001, 1.0), min_size=len(WIDTHS), max_size=len(WIDTHS)),
    st.lists(st.floats(0.0, 1.0, width=32), max_size=31),
)
def test_the_first_cut_has_the_best_rate_of_all_prefixes(
    seconds: list[float], probabilities: list[float]
) -> None:
    surface = CostSurface.flat(WIDTHS, seconds)
    tree = tree_with(probabilities)
    cut = first_cut(surface, tree)
    best = max(rate(surface, tree, num_nodes) for num_nodes in range(len(tree) + 1))
    assert rate(surface, tree, len(cut)) == pytest.approx(best, rel=1e-6)
    np.testing.assert_array_equal(cut.token_ids, tree.token_ids[: len(cut)])


def test_nothing_is_verified_where_nothing_pays() -> None:
    surface = CostSurface.flat((1, 2, 4), (1.0, 1.9, 3.5))
    assert len(first_cut(surface, tree_with([0.5, 0.5, 0.5]))) == 0


def test_all_is_verified_where_width_is_free() -> None:
    surface = CostSurface.flat((1, 2, 4), (1.0, 1.0, 1.0))
    assert len(first_cut(surface, tree_with([0.1, 0.01, 0.001]))) == 3


def test_a_drafter_is_asked_for_no_more_than_could_pay() -> None:
    dear = MeasuredBudget(CostSurface.flat((1, 2, 4, 8), (1.0, 2.5, 5.0, 10.0)))
    knee = MeasuredBudget(CostSurface.flat((1, 4, 8), (1.0, 1.2, 9.0)))
    assert (dear.ask(Load.of(0)), knee.ask(Load.of(0))) == (0, 3)
    assert len(knee.share([tree_with([1.0] * 7)], Load.of(0), 0.0)[0]) == 3


@pytest.mark.parametrize(("most_rows", "room"), [(None, 12), (9, 7), (5, 3), (2, 0), (1, 0)])
def test_no_more_nodes_are_shared_out_than_there_is_room_for(
    most_rows: int | None, room: int
) -> None:
    budget = MeasuredBudget(CostSurface.flat((1, 8), (1.0, 1.0)))
    load = Load((5, 5), most_rows=most_rows)
    assert budget.ask(load) == min(room, 7)
    shares = budget.share([tree_with([0.9] * 6), tree_with([0.8] * 6)], load, 0.0)
    assert sum(map(len, shares)) == room
    assert budget.ask(Load((5,), num_read=20, most_rows=20)) == 0


def test_a_drafter_is_asked_for_twice_of_what_paid_of_late() -> None:
    free = CostSurface.flat((1, 256), (1.0, 1.0))
    budget = MeasuredBudget(free)
    asked = []
    for _ in range(20):  # a draft of which little is worth verifying
        asked.append(budget.ask(Load.of(0)))
        budget.share([tree_with([0.9] * 3)], Load.of(0), 0.0)[0]
    assert (asked[0], asked[-1]) == (255, 16)
    for _ in range(5):  # and then all that can be had
        asked.append(budget.ask(Load.of(0)))
        budget.share([tree_with([0.9] * asked[-1])], Load.of(0), 0.0)[0]
    assert asked[-5:] == [16, 32, 64, 128, 255]


def test_fixed_budget_takes_the_first_nodes() -> None:
    assert len(FixedBudget(2).share([tree_with([0.9, 0.8, 0.7])], Load.of(0), 0.0)[0]) == 2
    assert len(FixedBudget(9).share([tree_with([0.9, 0.8, 0.7])], Load.of(0), 0.0)[0]) == 3


def test_halving_bounds_what_is_asked_for_and_verified() -> None:
    free = CostSurface.flat((1, 8), (1.0, 1.0))
    for budget in (MeasuredBudget(free), FixedBudget(7)):
        budget.halve()
        assert budget.ask(Load.of(0)) == 3
        assert len(budget.share([tree_with([0.9] * 7)], Load.of(0), 0.0)[0]) == 3
        budget.halve()
        budget.halve()
        assert budget.ask(Load.of(0)) == 0


@dataclass
class Simulated:
    """Decoding in made-up time: a drafter, how long it takes, and what is accepted of it."""

    surface: CostSurface
    guess: Callable[[int], Guess]
    draft_s: float = 0.0
    slowness: Callable[[int], float] = lambda _: 1.0
    widths: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0

    def run(self, budget: MeasuredBudget, steps: range) -> float:
        """Return tokens per second."""
        self.seconds, self.tokens = 0.0, 0
        for step in steps:
            tree, agreed, took = DraftTree.empty(), 0, 0.0
            if budget.ask(Load.of(100)):
                self.asked.append(step)
                tree, agreed = self.guess(step)
                took = self.draft_s
            cut = budget.share([tree], Load.of(100), took)[0] if took or len(tree) else tree
            path = tree.path_to(agreed - 1) if agreed else np.empty(0, np.int64)
            next_token = (
                int(tree.token_ids[path[-1]] + 1) if agreed and agreed < len(tree) else MISS
            )
            if len(path) > len(cut):
                path, next_token = path[: len(cut)], int(tree.token_ids[len(cut)])
            pass_s = cost(self.surface, 1 + len(cut)) * self.slowness(step)
            if agreed == len(path):
                next_token = MISS
            budget.learn([PassOutcome(cut, path, next_token)], Load.of(100), pass_s)
            self.widths.append(len(cut))
            self.seconds += pass_s + took
            self.tokens += 1 + len(path)
        return self.tokens / self.seconds


def test_widths_approach_the_optimum_found_by_brute_force() -> None:
    """The drafter claims 0.95 for each next token, and 0.8 are right."""
    rng = np.random.default_rng(0)
    claims = [0.95**depth for depth in range(1, 32)]

    def guess(_: int) -> Guess:
        wrong = np.flatnonzero(rng.random(31) > 0.8)
        return chain_of(claims), int(wrong[0]) if len(wrong) else 31

    simulated = Simulated(DEAR, guess)
    budget = MeasuredBudget(DEAR)
    simulated.run(budget, range(300))
    reached = simulated.run(budget, range(300, 2000))
    rates = [
        (1 + sum(0.8**depth for depth in range(1, nodes + 1))) / cost(DEAR, 1 + nodes)
        for nodes in range(32)
    ]
    assert reached > 0.97 * max(rates)
    assert abs(np.median(simulated.widths[300:]) - int(np.argmax(rates))) <= 3


def test_a_drafter_less_sure_than_right_is_raised() -> None:
    rng = np.random.default_rng(0)

    def guess(_: int) -> Guess:
        return chain_of([0.45]), int(rng.random() < 0.95)

    simulated = Simulated(DEAR, guess)
    simulated.run(MeasuredBudget(DEAR), range(100))
    assert simulated.widths[0] == 0
    assert np.mean(simulated.widths[40:]) > 0.9


@pytest.mark.parametrize(
    ("draft_s", "num_steps"), [(0.0001, 800), (0.02, 800), (0.3, 2000), (3.0, 2000)]
)
@pytest.mark.parametrize("surface", [CHEAP, DEAR])
def test_an_adversary_costs_less_than_three_percent(
    surface: CostSurface, draft_s: float, num_steps: int
) -> None:
    """What the first drafts take before they are found out is soon regained."""
    simulated = Simulated(surface, lambda _: (chain_of([0.95] * 3), 0), draft_s)
    assert simulated.run(MeasuredBudget(surface), range(num_steps)) > 0.97


def test_an_adversary_that_changes_sides_costs_less_than_three_percent() -> None:
    """It is right for as long as it takes to be believed."""
    simulated = Simulated(DEAR, lambda step: (chain_of([0.95] * 3), 3 * (step % 40 < 6)), 0.001)
    assert simulated.run(MeasuredBudget(DEAR), range(1000)) > 0.97


@pytest.mark.parametrize("draft_s", [0.001, 0.1])
def test_a_turn_to_repeating_text_is_noticed_within_few_steps(draft_s: float) -> None:
    simulated = Simulated(
        DEAR, lambda step: (chain_of([0.95] * 8), 8 if step >= 500 else 0), draft_s
    )
    simulated.run(MeasuredBudget(DEAR), range(600))
    assert np.mean(np.array(simulated.widths[50:500]) == 0) > 0.97
    noticed = np.flatnonzero(np.array(simulated.widths[500:]) == 8)
    assert noticed[0] <= (5 if draft_s < 0.01 else 25)
    assert np.mean(np.array(simulated.widths[530:]) == 8) > 0.95


def test_a_slow_drafter_is_asked_only_while_it_pays() -> None:
    """Its drafts bring two tokens, that is more than it takes, or none; some steps go without."""
    simulated = Simulated(
        CHEAP, lambda step: (chain_of([0.95] * 2), 2 if step < 100 else 0), draft_s=0.5
    )
    simulated.run(MeasuredBudget(CHEAP), range(600))
    assert len([step for step in simulated.asked if step < 100]) >= 92
    assert len([step for step in simulated.asked if step >= 150]) < 15


def test_a_drafter_that_brings_nothing_for_its_time_is_left_alone() -> None:
    """It is right, but a token of its takes as long as two of the target's."""
    simulated = Simulated(CHEAP, lambda _: (chain_of([0.95]), 1), draft_s=2.0)
    assert simulated.run(MeasuredBudget(CHEAP), range(800)) > 0.97


def test_distrust_of_the_unsure_does_not_touch_the_sure() -> None:
    simulated = Simulated(CHEAP, lambda _: (tree_with([0.95, 0.5, 0.5]), 1))
    simulated.run(MeasuredBudget(CHEAP), range(50))
    assert simulated.widths[-1] == 1


def test_a_busy_machine_changes_no_widths() -> None:
    """Passes take twice as long after a while, and every tenth one thirty times."""

    def slowness(step: int) -> float:
        return (30.0 if step % 10 == 0 else 1.0) * (2.0 if step > 500 else 1.0)

    widths = []
    for busy in (lambda _: 1.0, slowness):
        lengths = iter(np.random.default_rng(0).geometric(0.1, 1500) % 20)
        claims = chain_of([0.9**depth for depth in range(1, 20)])

        def guess(_: int, claims: DraftTree = claims, lengths: Iterator[int] = lengths) -> Guess:
            return claims, int(next(lengths))

        simulated = Simulated(DEAR, guess, slowness=busy)
        simulated.run(MeasuredBudget(DEAR), range(1500))
        widths.append(np.mean(simulated.widths[-300:]))
    assert widths[1] == pytest.approx(widths[0], rel=0.15)


def test_costs_that_were_measured_wrong_are_found_out() -> None:
    """Width was measured to be free, and is not: nothing is worth verifying."""
    rng = np.random.default_rng(0)
    believed = CostSurface.flat((1, 2, 4), (1.0, 1.0, 1.0))
    truth = CostSurface.flat((1, 2, 4), (1.0, 2.0, 2.5))
    simulated = Simulated(
        truth, lambda step: (tree_with([0.3] * (step % 3)), int(rng.random() < 0.0))
    )
    simulated.run(MeasuredBudget(believed), range(1000))
    assert np.mean(simulated.widths[:6]) > 0.5
    assert np.mean(simulated.widths[-200:]) < 0.1


def test_nodes_of_all_sequences_compete() -> None:
    """A sure tree gets the nodes that pay, whatever place it has; a hopeless one gets none."""
    dear = CostSurface.flat((1, 2, 4, 8, 16), (1.0, 1.3, 1.9, 3.1, 5.5))
    sure, doubtful, hopeless = (tree_with([p] * 4) for p in (0.95, 0.5, 0.05))
    for trees in ([sure, doubtful, hopeless], [hopeless, sure, doubtful]):
        load = Load([100] * 3)
        shares = dict(
            zip(map(id, trees), MeasuredBudget(dear).share(trees, load, 0.0), strict=True)
        )
        assert len(shares[id(sure)]) == 4
        assert len(shares[id(hopeless)]) == 0
        assert len(shares[id(doubtful)]) <= 4


def test_sharing_finds_the_best_of_all_prefixes() -> None:
    rng = np.random.default_rng(5)
    surface = CostSurface.flat((1, 2, 4, 8, 16), (1.0, 1.05, 1.2, 1.9, 4.0))
    for _ in range(50):
        trees = [tree_with(np.sort(rng.random(3))[::-1].tolist()) for _ in range(3)]
        load = Load([10] * 3, num_read=int(rng.integers(0, 3)))
        shares = MeasuredBudget(surface).share(trees, load, 0.0)
        assert shared_rate(surface, load, trees, [len(share) for share in shares]) == pytest.approx(
            max(
                shared_rate(surface, load, trees, list(counts))
                for counts in itertools.product(range(4), repeat=3)
            )
        )


def shared_rate(
    surface: CostSurface, load: Load, trees: Sequence[DraftTree], counts: Sequence[int]
) -> float:
    """Return tokens a second of a step; the time of prompts that it reads is theirs."""
    nodes = [
        float(p) for tree, n in zip(trees, counts, strict=True) for p in tree.probabilities[:n]
    ]
    tokens, width = len(trees) + sum(nodes), load.width + len(nodes)
    prompts_s = cost(surface, load.width) - cost(surface, len(trees))
    return tokens / (cost(surface, width) - prompts_s)


def test_where_another_row_costs_as_much_as_it_brings_there_are_no_drafts() -> None:
    steep = CostSurface.flat((1, 2, 4, 8, 16), (1.0, 1.01, 1.02, 2.04, 4.08))
    trees = [tree_with([0.7, 0.5, 0.3])] * 8
    counts = []
    for num_sequences in (1, 2, 4, 8):
        budget = MeasuredBudget(steep)
        shares = budget.share(trees[:num_sequences], Load([10] * num_sequences), 0.0)
        counts.append(sum(map(len, shares)))
    assert counts[0] == 3
    assert counts[-1] == 0


def test_passes_wider_than_measured_cost_as_the_widest_do() -> None:
    costs = AdaptiveCosts(CostSurface.flat((1, 2, 4, 8), (1.0, 1.0, 2.0, 4.0)))
    np.testing.assert_allclose(costs.table_to(12, 0)[7:], [4.0, 4.5, 5.0, 5.5, 6.0])
    assert len(costs.table_to(3, 0)) == 3


@pytest.mark.parametrize("each_s", [0.0, 0.004, 0.02])
def test_what_nodes_add_to_a_step_counts_like_their_pass(each_s: float) -> None:
    """Sixteen sequences, whose trees take longer to accept and to learn from than to compute."""
    rng = np.random.default_rng(2)
    believed = CostSurface.flat((1, 256), (1.0, 1.1))
    budget = MeasuredBudget(believed)
    load = Load([100] * 16)
    tree = tree_with([0.6, 0.1, 0.1, 0.1])

    def run(num_steps: int) -> float:
        tokens, took = 0, 0.0
        for _ in range(num_steps):
            trees = [tree] * 16 if budget.ask(load) else [DraftTree.empty()] * 16
            shares = budget.share(trees, load, 0.05) if len(trees[0]) else trees
            outcomes = []
            for share in shares:
                hit = rng.choice(5, p=[0.6, 0.1, 0.1, 0.1, 0.1])
                path = share.path_to(int(hit)) if hit < len(share) else np.empty(0, np.int64)
                outcomes.append(PassOutcome(share, path, MISS))
            nodes = sum(map(len, shares))
            pass_s, other_s = cost(believed, 16 + nodes), 0.02 + each_s * nodes
            budget.learn(outcomes, load, pass_s, other_s)
            tokens += 16 + sum(len(each.path) for each in outcomes)
            took += pass_s + other_s + (0.05 if len(trees[0]) else 0.0)
        return tokens / took

    run(100)
    reached = run(400)

    def pace(nodes: int) -> float:
        expected = 16 * (1 + [0.0, 0.6, 0.7, 0.8, 0.9][nodes])
        step_s = cost(believed, 16 + 16 * nodes) + 0.02 + each_s * 16 * nodes
        return expected / (step_s + (0.05 if nodes else 0.0))

    assert reached > 0.97 * max(pace(nodes) for nodes in range(5))
