"""Replays of drafts inside vLLM count what vLLM would."""

from collections.abc import Sequence

from benchmarks.engines.vllm_replay import num_steps
from retriever.drafter import TokenIds

PROMPT = [1, 2, 3]
OUTPUT = list(range(10, 30))


def test_steps_are_those_of_a_verifier() -> None:
    seen: list[tuple[int, int]] = []

    def half_right(tokens: TokenIds, num_new: int) -> Sequence[int]:
        seen.append((len(tokens), num_new))
        last = int(tokens[-1])
        return [last + 1, last + 2, 0, last + 4]

    assert num_steps(lambda *_: [], PROMPT, OUTPUT) == len(OUTPUT)
    # The prompt's step brings one token, every other one two accepted and one of the model's.
    assert num_steps(half_right, PROMPT, OUTPUT) == 1 + -(-(len(OUTPUT) - 1) // 3)
    assert seen[:3] == [(4, 1), (7, 3), (10, 3)]
