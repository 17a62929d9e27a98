"""Phrase tables as the predictor reads them."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from indexer.reader import COUNT_VALUES, Index, PhraseTables, sum_tables, token_dtype
from retriever.kernels.layout import Tables

_FREQUENT: Final = 4.0  # natural logarithm of how rare a token is that counts as not rare at all
_RARE: Final = 12.0  # and of one that counts as rare as can be


def tables_of(indexes: Sequence[Index]) -> Tables:
    """Return the phrase tables of indexes of one vocabulary as kernels read them.

    Those of a single index stay mapped. Those of several are added up, in a temporary file that is
    mapped as well unless they are small.

    Raises:
        indexer.errors.IndexerError: they cannot be added up.
    """
    if not indexes:
        return to_kernel(PhraseTables.empty(0, np.dtype(token_dtype(0))))
    if len(indexes) == 1:
        return to_kernel(indexes[0].phrases)
    return to_kernel(sum_tables([index.phrases for index in indexes]))


def to_kernel(tables: PhraseTables) -> Tables:
    """Add each token's share in the corpus, and how rare it is."""
    occurrences = COUNT_VALUES[tables.counts[0]].astype(np.float64) + 1.0
    shares = occurrences / max(occurrences.sum(), 1.0)
    rarity = (-np.log(shares) - _FREQUENT) / (_RARE - _FREQUENT)
    starts1, starts2, starts3 = tables.starts
    _, tokens2, tokens3, tokens4 = tables.tokens
    counts1, counts2, counts3, counts4 = tables.counts
    return Tables(
        starts1=starts1,
        starts2=starts2,
        starts3=starts3,
        tokens2=tokens2,
        tokens3=tokens3,
        tokens4=tokens4,
        counts1=counts1,
        counts2=counts2,
        counts3=counts3,
        counts4=counts4,
        values=COUNT_VALUES,
        shares=shares.astype(np.float32),
        rarity=np.clip(rarity, 0.0, 1.0).astype(np.float32),
    )
