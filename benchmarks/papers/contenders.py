"""All rules as contenders of `foredraft bench`: beside those of texts, two that ask a model.

Token Recycling reads the target's logits, RASD a draft model or a head.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from benchmarks.papers import DRAFTERS as OF_TEXTS
from benchmarks.papers.rasd import RasdDrafter
from benchmarks.papers.token_recycling import TokenRecycling
from decoder.assembly import draft_limits, draft_readers
from decoder.plugins.contenders.drafting_rules import PublishedRule, opened
from decoder.plugins.contenders.registry import MODELS, ContenderEntry, Means
from retriever.drafter import Drafter


@contextmanager
def _token_recycling(means: Means) -> Iterator[Drafter]:
    size = draft_limits(means.language_model).model_vocabulary
    yield TokenRecycling(size or means.language_model.vocabulary.size)


@contextmanager
def _rasd(means: Means) -> Iterator[Drafter]:
    """Have RASD over REST's rule, with the draft model, or the head where there is none."""
    model = means.language_model
    reader = draft_readers(means.drafts, model)[-1]
    indexes = means.drafts.index
    with opened(OF_TEXTS["rest"], indexes, model.vocabulary, means.max_nodes) as retrieval:
        yield RasdDrafter(retrieval, reader, draft_limits(model))


DRAFTERS: Final[Mapping[str, ContenderEntry | PublishedRule]] = {
    **OF_TEXTS,
    "recycling": ContenderEntry(
        "recycling",
        "Token Recycling: a fixed tree of the 8 likeliest tokens last seen after each token",
        "arXiv:2408.08696",
        _token_recycling,
    ),
    "rasd": ContenderEntry(
        "rasd",
        "RASD: what rest drafts, pruned by a model's likeliest first tokens, and its own tree",
        "arXiv:2503.03434",
        _rasd,
        needs=MODELS,
    ),
}
"""Contenders by the names that `foredraft bench --contender` takes."""
