import numpy as np
import pytest

from decoder.plugins.contenders.contender import Run
from decoder.plugins.contenders.standings import MT_BENCH, Comparison, standings


def run(num_tokens: int, num_passes: int, seconds: float) -> Run:
    return Run([*range(num_tokens)], seconds, num_passes)


def test_figures_are_sums_over_sums_and_prompts_passes_are_not_steps() -> None:
    comparisons = [
        Comparison("qa", {"plain": run(9, 9, 9.0), "a": run(9, 5, 3.0)}, 0),
        Comparison("qa", {"plain": run(3, 3, 3.0), "a": run(3, 2, 3.0)}, 1),
    ]
    found = standings(comparisons, "plain")
    assert found["num_groups"] == 2
    figures = found["contenders"]["a"]
    assert figures["speedup"][0] == pytest.approx(2.0)
    assert figures["accepted_tokens"][0] == pytest.approx((8 + 2) / (4 + 1))
    assert figures["tokens_per_pass"] == pytest.approx(12 / 7)
    assert found["contenders"]["plain"]["speedup"] == pytest.approx([1, 1, 1])
    assert found["contenders"]["plain"]["accepted_tokens"] == pytest.approx([1, 1, 1])


def test_turns_and_seeds_of_a_prompt_are_resampled_as_one() -> None:
    """Two prompts of five answers each: the ends are those of the prompts themselves."""
    comparisons = [
        Comparison("qa", {"plain": run(5, 5, 5.0), "a": run(5, passes, 5.0)}, prompt)
        for prompt, passes in ((0, 3), (1, 5))
        for _ in range(5)
    ]
    value, low, high = standings(comparisons, "plain")["contenders"]["a"]["accepted_tokens"]
    assert (value, low, high) == pytest.approx((40 / 30, 1.0, 2.0))


@pytest.mark.bench
def test_intervals_cover_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(60):
        steps = rng.integers(10, 20, 40)
        accepted = rng.binomial(2 * steps, 0.4)
        comparisons = [
            Comparison(
                "qa", {"plain": run(2, 2, 1.0), "a": run(int(s + a) + 1, int(s) + 1, 1.0)}, n
            )
            for n, (s, a) in enumerate(zip(steps.tolist(), accepted, strict=True))
        ]
        figures = standings(comparisons, "plain")["contenders"]["a"]
        _, low, high = figures["accepted_tokens"]
        covered += low <= 1.8 <= high
    assert 46 <= covered <= 60


def test_contenders_are_resampled_alike_so_that_what_is_always_better_is_surely_so() -> None:
    rng = np.random.default_rng(1)
    comparisons = []
    for number, seconds in enumerate(rng.uniform(1, 9, 12)):
        runs = {"plain": run(9, 9, seconds), "a": run(9, 5, seconds / 2), "b": run(9, 6, seconds)}
        comparisons.append(Comparison("qa", runs, number))
    found = standings(comparisons, "plain")
    assert found["contenders"]["a"]["speedup"] == pytest.approx([2, 2, 2])
    assert found["against"]["a"]["b"]["speed"] == pytest.approx([2, 2, 2])
    assert found["against"]["b"]["a"]["accepted_tokens"] == pytest.approx([0.8, 0.8, 0.8])


def test_categories_are_the_columns_of_spec_bench_s_tables() -> None:
    runs = {"plain": run(2, 2, 1.0)}
    comparisons = [Comparison(name, runs, n) for n, name in enumerate(("writing", "rag", "stem"))]
    found = standings(comparisons, "plain")["categories"]
    assert {name: each["num_groups"] for name, each in found.items()} == {MT_BENCH: 2, "rag": 1}
