"""What outputs of merged drafts must be, and a drafter that fails meanwhile."""

from collections.abc import Sequence

from retriever.client.local import LocalDrafter
from retriever.drafter import DraftRequest
from retriever.tree import DraftTree
from tests.engines.sglang.sglang_decoding import plain

PROMPTS = [[seed, 1, 2, 5, 3, seed] for seed in range(3)]


def check_exact(outputs: Sequence[Sequence[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        assert list(tokens[len(prompt) :]) == plain(prompt, len(tokens) - len(prompt))


class Broken(LocalDrafter):
    """Raises what no drafter should, now and then."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period = period
        self.num_calls = 0

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.num_calls += 1
        if self.num_calls % self.period == 0:
            raise RuntimeError("planted")
        return super().draft(requests)
