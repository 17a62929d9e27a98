"""From names and options to a decoder that is ready to run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from decoder.budget import MeasuredBudget, measure_costs
from decoder.errors import ContradictoryOptionsError
from decoder.loop import Decoder
from decoder.models import LanguageModel
from decoder.target import Target
from decoder.verification import AcceptRule, accept_greedy, accept_sampled
from indexer.tokenizer import vocabulary_of
from retriever.client import RemoteDrafter
from retriever.drafter import Drafter
from retriever.embedded import EmbeddedDrafter


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """Where drafts come from: a server, or databases in this process.

    Attributes:
        indexes: directories of indexes to draft from in this process.
        server: address of a drafting service; excludes `indexes`.

    Raises:
        ContradictoryOptionsError: both are given.
    """

    indexes: Sequence[Path] = field(default=())
    server: str | None = None

    def __post_init__(self) -> None:
        if self.indexes and self.server is not None:
            raise ContradictoryOptionsError(
                "--index and --server exclude each other: a server drafts from its own indexes"
            )

    def describe(self) -> str:
        """Return a few words for reports."""
        if self.server is not None:
            return f"server {self.server}"
        return ", ".join(["context", "generations", *map(str, self.indexes)])

    @contextmanager
    def connect(self, language_model: LanguageModel) -> Iterator[Drafter]:
        """Have a drafter for a model's vocabulary during the block.

        Raises:
            IndexerError: an index cannot be opened or was built for another tokenizer.
        """
        vocabulary = vocabulary_of(language_model.tokenizer)
        drafter: EmbeddedDrafter | RemoteDrafter
        if self.server is not None:
            drafter = RemoteDrafter(self.server, vocabulary_fingerprint=vocabulary.fingerprint)
        else:
            drafter = EmbeddedDrafter.open_indexes(self.indexes, vocabulary=vocabulary)
            drafter.warm()
        try:
            yield drafter
        finally:
            drafter.shut_down()


def assemble(
    language_model: LanguageModel, drafter: Drafter, accept: AcceptRule = accept_greedy
) -> Decoder:
    """Build a decoder that has measured what its model's passes cost.

    Raises:
        UnsupportedModelError: the model cannot verify drafts.
    """
    target = Target(language_model.model)
    budget = MeasuredBudget(measure_costs(target))
    return Decoder(target, drafter, budget, accept, language_model.stop_ids)


def accept_rule(temperature: float, seed: int | None, device: str) -> AcceptRule:
    """Return the rule for a temperature: greedy at zero, else sampling.

    Args:
        temperature: zero or more.
        seed: makes sampling repeatable; `None` seeds from the system's entropy.
        device: where the logits lie.
    """
    if temperature == 0:
        return accept_greedy
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return partial(accept_sampled, temperature=temperature, generator=generator)
