"""A pass of many sequences by one rule: one after the other, or all in one go.

In one go, what processes logits and what chooses tokens are the rule's own, and so are the random
numbers; only following the choices is written again for arrays. A test has both ways agree token
for token. One way is as decoders do it, the other ten times as fast.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.sampling import rule as rules
from decoder.sampling.choice import Chooser, Draw, DrawnChildren, Rejection
from decoder.sampling.rule import ProcessedRule
from decoder.sampling.verification import CERTAIN, PassContext, drawn_numbers
from retriever.tree import ROOT
from tests.oracles.exactness.drafts import PROPOSALS, Batch


def stepped(rule: ProcessedRule, batch: Batch, contexts: Sequence[PassContext]) -> list[list[int]]:
    """Return the tokens that each sequence gets, asking the rule for one after the other."""
    emitted = []
    for number, context in enumerate(contexts):
        tree, logits = batch.tree(number)
        path, token = rule(tree, logits, context)
        emitted.append([*tree.token_ids[path].tolist(), token])
    return emitted


def stepped_together(
    rule: ProcessedRule, batch: Batch, contexts: Sequence[PassContext]
) -> list[list[int]]:
    """Return the same, in arrays; all sequences are of one length."""
    scores = _processed(rule, batch, contexts)
    choices = _choice(rule, batch, contexts)(scores.flatten(0, 1), slice(None))
    return _followed(batch, choices.numpy().reshape(scores.shape[:2]))


def _processed(rule: ProcessedRule, batch: Batch, contexts: Sequence[PassContext]) -> torch.Tensor:
    """Return float32[sequences, 1 + N, SIZE], the logits after processors."""
    committed = torch.from_numpy(np.array([context.tokens for context in contexts], np.int64))
    processing, scores = rule.processing, batch.logits.clone()
    for node in range(ROOT, len(batch.parents)):
        path = torch.from_numpy(batch.tokens[:, [above + 1 for above in batch.path(node)]])
        scores[:, node + 1] = processing.before_constraint(
            torch.cat([committed, path], dim=1), scores[:, node + 1], contexts[0].num_prompt_tokens
        )
    return processing.after_constraint(scores.flatten(0, 1)).view(scores.shape)


def _choice(rule: ProcessedRule, batch: Batch, contexts: Sequence[PassContext]) -> Chooser:
    """Return what chooses in all sequences: their rows one after the other."""
    depths = np.array([len(batch.path(node)) for node in range(ROOT, len(batch.parents))])
    count = int(depths.max()) + 1
    own = (np.arange(len(contexts))[:, None] * count + depths).reshape(-1)
    if rule.settings.coupled:
        uniforms = rules.uniforms  # type: ignore[attr-defined]  # an error may be planted there
        points = [uniforms(rule.seed, context, count) for context in contexts]
        return Draw(own, np.concatenate(points))
    drawn = batch.rows != CERTAIN
    if not drawn.any():
        return Draw(own, np.concatenate(_numbers(rule, contexts, (count,))))
    children = _drawn_children(batch, drawn[0])
    shape = (count, children.tokens.shape[1] + 1)
    return Rejection(children, PROPOSALS, own, np.concatenate(_numbers(rule, contexts, shape)))


def _numbers(
    rule: ProcessedRule, contexts: Sequence[PassContext], shape: tuple[int, ...]
) -> list[NDArray[np.float64]]:
    return [drawn_numbers(rule.seed, context, shape) for context in contexts]


def _drawn_children(batch: Batch, is_drawn: NDArray[np.bool_]) -> DrawnChildren:
    of = [
        [node for node in np.flatnonzero(is_drawn) if batch.parents[node] == parent]
        for parent in range(ROOT, len(batch.parents))
    ]
    most = max(map(len, of))
    tokens = np.zeros((*batch.tokens.shape, most), np.int64)
    rows = np.full(tokens.shape, CERTAIN)
    for row, nodes in enumerate(of):
        for column, node in enumerate(nodes):
            tokens[:, row, column] = batch.tokens[:, node + 1]
            rows[:, row, column] = batch.rows[:, node]
    counts = np.tile([len(nodes) for nodes in of], len(tokens))
    return DrawnChildren(tokens.reshape(-1, most), rows.reshape(-1, most), counts)


def _followed(batch: Batch, choices: NDArray[np.int64]) -> list[list[int]]:
    """Walk down all trees, with choices int64[sequences, 1 + N]."""
    current = np.full(len(choices), ROOT)
    numbers = np.arange(len(choices))
    emitted = [[token] for token in choices[:, 0].tolist()]
    # Every parent precedes its children.
    for node, parent in enumerate(batch.parents):
        is_next = batch.is_kept[:, node + 1] & (current == parent)
        is_next &= batch.tokens[:, node + 1] == choices[numbers, current + 1]
        current[is_next] = node
        for number in np.flatnonzero(is_next).tolist():
            emitted[number].append(int(choices[number, node + 1]))
    return emitted
