"""The acceptance rule for sampling settings, processors and a constraint."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import torch
from transformers import LogitsProcessor

from decoder.errors import DeadEndError, InvalidLogitsError
from decoder.sampling.choice import (
    NOTHING,
    Chooser,
    Draw,
    DrawnChildren,
    Rejection,
    drawn,
    most_probable,
)
from decoder.sampling.constraint import Constraint, Grammar, GrammarProcessor
from decoder.sampling.processors import PathScores, Processing, Warping
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import (
    CERTAIN,
    AcceptRule,
    Drawing,
    PassContext,
    SampledTree,
    Selection,
    accept_greedy,
    drawn_numbers,
    is_waited_for,
    uniforms,
)
from decoder.sampling.walk import Acceptance, follow
from retriever.predict.grammar.forced_drafts import ForcedDrafts
from retriever.tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedRule:
    """An accept rule that chooses tokens from processed logits.

    A row is processed when the path reaches it. If processors use only the row, and the logits are
    on another device, all rows are processed in advance. If a `selection` was requested, the pass
    itself processes them.

    Attributes:
        settings: how tokens are chosen.
        processing: the processing of logits before a token is chosen.
        seed: seed of the random numbers.
    """

    settings: SamplingSettings
    processing: Processing
    seed: int

    def __call__(self, tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Acceptance:
        """Accept the path along the tokens that the target chooses.

        Raises:
            DeadEndError: no token is possible after the committed tokens.
            InvalidLogitsError: the logits after the committed tokens are NaN.
        """
        chosen = self._selected(logits, context)
        if chosen is not None:
            acceptance = follow(tree, lambda _: chosen, context.goes_on, together=True)
            return _possible(tree, logits, acceptance)
        scores = PathScores(self.processing, tree, logits, context)
        choose = self._choice(tree, context)
        together = self.processing.is_blind and is_waited_for(logits)
        with torch.inference_mode():
            path, token = follow(
                tree,
                lambda rows: choose(scores.of(rows), rows),
                context.goes_on,
                together=together,
            )
        return _possible(tree, logits, (path, token))

    def forced(self, tenant: str) -> ForcedDrafts | None:
        """Return a source of the tokens that a grammar forces; `None` without a grammar."""
        memory = self.processing.memory
        callers = (each.grammar for each in self.processing.callers if _is_grammar(each))
        grammar = next(callers, None) if memory is None else memory.constraint
        return grammar.drafts(tenant) if isinstance(grammar, Grammar) else None

    @property
    def drawing(self) -> Drawing | None:
        """How tokens are sampled if only sampling settings apply; otherwise `None`."""
        if self.settings.is_greedy or not self.processing.is_of_settings:
            return None
        return SettingsDrawing(replace(self.settings, seed=None, coupled=True))

    def selection(self, tree: DraftTree, context: PassContext) -> Selection | None:
        """Return how a pass itself samples all rows' tokens; `None` if only the rule can choose."""
        drawing = self.drawing
        choice = None if drawing is None else self._choice(tree, context)
        if drawing is None or not isinstance(choice, Draw):
            return None
        return Selection(self, drawing, choice.points[choice.depths])

    def _selected(self, logits: torch.Tensor, context: PassContext) -> torch.Tensor | None:
        choices = context.choices
        if choices is None or not choices.are_of(logits):
            return None
        return choices.selected_for(self)

    def _choice(self, tree: DraftTree, context: PassContext) -> Chooser:
        if self.settings.is_greedy:
            return most_probable
        depths = np.concatenate(([0], tree.depths()))
        count = int(depths.max()) + 1
        if self.settings.coupled:
            return Draw(depths, uniforms(self.seed, context, count))
        if isinstance(tree, SampledTree) and (tree.rows != CERTAIN).any():
            children = DrawnChildren.of(tree)
            points = drawn_numbers(self.seed, context, (count, children.tokens.shape[1] + 1))
            return Rejection(children, tree.proposals, depths, points)
        return Draw(depths, drawn_numbers(self.seed, context, (count,)))


@dataclass(frozen=True, slots=True)
class SettingsDrawing:
    """A `Drawing` that samples with settings that use no earlier tokens.

    Attributes:
        settings: the sampling settings; equal settings choose the same tokens, because random
            numbers are passed in.
    """

    settings: SamplingSettings

    def __call__(self, logits: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """Choose a token for each row."""
        return drawn(Warping(self.settings)(logits.to(torch.float32, copy=True)), points)


def accept_rule(
    settings: SamplingSettings | None = None,
    processors: Sequence[LogitsProcessor] = (),
    constraint: Constraint[Any] | None = None,
) -> AcceptRule:
    """Return the accept rule that preserves the target's distribution under sampling settings.

    Args:
        settings: how tokens are chosen; greedy by default.
        processors: transformers' logits processors, applied along each path with all tokens before
            a row as `input_ids`. They may keep state: they see each position of the output once, in
            order, and never a rejected token.
        constraint: decides which tokens may be chosen.
    """
    settings = SamplingSettings() if settings is None else settings
    processing = Processing(settings, processors, constraint)
    if settings.is_greedy and processing.is_empty:
        return accept_greedy
    seed = secrets.randbits(64) if settings.seed is None else settings.seed
    return ProcessedRule(settings, processing, seed)


def _is_grammar(processor: LogitsProcessor) -> TypeGuard[GrammarProcessor]:
    return isinstance(processor, GrammarProcessor)


def _possible(tree: DraftTree, logits: torch.Tensor, acceptance: Acceptance) -> Acceptance:
    """Accept the path up to a dead end; the next pass starts there and raises the error."""
    path, token = acceptance
    if token != NOTHING:
        return acceptance
    if len(path) > 0:
        return path[:-1], int(tree.token_ids[path[-1]])
    if logits[0].isnan().any():
        raise InvalidLogitsError(
            "the model's logits are NaN: load it with another dtype, such as float32"
        )
    raise DeadEndError(
        "no token may come next: the constraint and the logits processors exclude all of them"
    )
