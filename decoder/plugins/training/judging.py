"""The evaluation of a head: how often it predicts the target's tokens in held-out texts."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.plugins.speculators.eagle import Eagle3Head
from decoder.plugins.training.head_trainer import (
    BATCH_TOKENS,
    Examples,
    Teaching,
    batch_of,
    batches_of,
    places_at,
    unrolled,
)

RANKS: Final = (1, 4, 8)
"""A token counts as predicted if it is among this many most probable tokens."""

DEPTHS: Final = 4
"""Number of tokens that are predicted after each position."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadAgreement:
    """Shares of tokens that a head predicts if the tokens drafted before them were right.

    Attributes:
        shares: float64[depths, ranks], the share of predicted tokens. Depth 0 is the token right
            after the sequence, depth 1 is the token after that, and so on.
        num_places: int64[depths], the number of tokens to predict.
    """

    shares: NDArray[np.float64]
    num_places: NDArray[np.int64]

    @property
    def chain_tokens(self) -> float:
        """Tokens per pass that a chain of the head's first choices would add."""
        return float(np.cumprod(self.shares[:, 0]).sum())

    @property
    def worth(self) -> float:
        """Tokens per pass that a tree with four children per node adds; training maximises this."""
        return float(np.cumprod(self.shares[:, 1]).sum())

    def report(self) -> dict[str, Any]:
        """Return the shares as plain values."""
        return {
            "chain_tokens": self.chain_tokens,
            "places": self.num_places.tolist(),
            **{
                f"top_{rank}_by_depth": [round(share, 4) for share in column]
                for rank, column in zip(RANKS, self.shares.T.tolist(), strict=True)
            },
        }


@torch.no_grad()
def agreement(
    head: Eagle3Head,
    teaching: Teaching,
    store: Examples,
) -> HeadAgreement:
    """Count the tokens of texts that a head predicts.

    Args:
        head: the head to evaluate.
        teaching: parts of the target.
        store: held-out texts.
    """
    head.eval()
    width = len(head.config.states) * head.config.target_size
    hits, places = torch.zeros(DEPTHS, len(RANKS)), torch.zeros(DEPTHS)
    columns, order = _columns(head), np.arange(len(store))
    for group in batches_of(order, store.lengths(), BATCH_TOKENS, np.random.default_rng(0)):
        examples = [store[number] for number in group]
        batch = batch_of(examples, width, head.config.target_size, teaching.device)
        outputs = unrolled(head, teaching, batch.tokens, batch.features, DEPTHS)
        for depth, output in enumerate(outputs):
            rows = places_at(batch.counts, depth).nonzero(as_tuple=True)
            came = columns[batch.tokens[rows[0], rows[1] + depth + 2]]
            best = head.logits(output[rows]).topk(RANKS[-1]).indices
            is_right = (best == came[:, None]).cpu()
            hits[depth] += torch.tensor([float(is_right[:, :n].any(-1).sum()) for n in RANKS])
            places[depth] += len(came)
    return HeadAgreement(
        (hits / places.clamp(min=1)[:, None]).double().numpy(), places.long().numpy()
    )


def _columns(head: Eagle3Head) -> torch.Tensor:
    """Return int64[vocabulary], the column of each token; -1 for tokens without a column."""
    columns = torch.full((head.config.layer.vocab_size,), -1)
    kept = head.columns
    tokens = torch.arange(len(columns)) if kept is None else kept.cpu()
    columns[tokens] = torch.arange(len(tokens))
    return columns.to(next(head.parameters()).device)
