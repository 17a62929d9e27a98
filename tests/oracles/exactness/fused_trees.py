"""Sampling through the loop with fused drafts of a small target, and what it should come to.

Retrieval and recycled logits name certain nodes; a head or a draft model draws the others, and both
stand in one tree, as `foredraft generate --draft-sampling` makes it. Target and draft model have
random weights and few tokens, the head drafts one token fewer: so the distribution of the output is
known, from passes of the target as it is.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from decoder.budget.budget import FixedBudget
from decoder.drafters.draft_model import DraftModel, ModelReader
from decoder.drafters.drawing import DrawnFusion, Draws
from decoder.drafters.following import states_of
from decoder.drafters.fusion import FusedSequence
from decoder.drafters.readers import TreeReader
from decoder.drafters.recycling import RecycledLogits
from decoder.loop import Decoder, Request
from decoder.model.passes import Read, Reading
from decoder.model.target import Target
from decoder.plugins.contenders.registry import FREE
from decoder.plugins.speculators.eagle import Eagle3Head, EagleConfig, EagleKind
from decoder.plugins.speculators.speculator import Speculator
from decoder.sampling.rule import accept_rule
from decoder.sampling.verification import CERTAIN, SampledTree
from retriever.follower import DraftLimits
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.oracles.exactness.scripted_target import (
    LENGTH,
    PROMPT,
    SETTINGS,
    SIZE,
    Setting,
    expected,
)
from tests.oracles.exactness.trials import Case, TrialOutcome, chi_square, survival

SHAPE: Final = "fused"
SHARED: Final = "fused, in shared passes"
"""The same with neighbours in every pass, which go on from another prompt."""

SHAPES_IN_LOOP: Final = (SHAPE, SHARED)
DRAWING: Final = ("head", "draft model")
"""What nodes are drawn from; the other one is fused, too, and stands behind."""

_NODES: Final = 8
_PARALLEL: Final = 4
_NEIGHBOURS_PROMPT: Final = [*PROMPT[::-1], *PROMPT]
_RECYCLED: Final = 1 << 8
_WIDTH: Final = 16
_NUM_LAYERS: Final = 2

Change = Callable[[SampledTree], SampledTree]
"""What an error makes of a draft before it is verified."""


def kind_of(drawing: str) -> str:
    """Return the kind of nodes, as cases state it."""
    return f"drawn by a {drawing}"


def fused_cases(*, full: bool = False) -> list[Case]:
    """Return every setting once, alone or in shared passes, or all that there are."""
    cases = [
        [
            Case(setting, shape, kind_of(drawing), coupled=False)
            for shape in SHAPES_IN_LOOP
            for drawing in DRAWING
        ]
        for setting in SETTINGS
    ]
    if full:
        return [case for each in cases for case in each]
    return [each[number % len(each)] for number, each in enumerate(cases)]


def run_fused(
    case: Case,
    draws: int,
    seed: int = 0,
    change: Change = lambda tree: tree,
    verify: type[Target] = Target,
) -> TrialOutcome:
    """Decode short outputs with fused drafts, and test their distribution.

    Args:
        case: one of `fused_cases`.
        draws: how many tokens to look at, at least.
        seed: of rule and drafts.
        change: plants an error in drafts.
        verify: verifies drafts; another one plants an error in passes.

    Raises:
        ValueError: drafts held certain nodes alone, or drawn ones alone.
    """
    setting, count = SETTINGS[case.setting], -(-draws // LENGTH)
    decode = _decoded_together if case.shape == SHARED else _decoded
    rule = accept_rule(replace(setting.sampling, seed=seed, coupled=False), setting.processors)
    with closing(_opened(setting, case.kind, seed, change)) as fused:
        target = verify(small_model(0), states=states_of(fused.drafter))
        outputs, num_passes = decode(
            Decoder(target, fused.drafter, FixedBudget(_NODES), rule), count
        )
    fused.drafter.check_kinds()
    counts = np.zeros((SIZE,) * LENGTH, np.int64)
    np.add.at(counts, tuple(np.array([output[:LENGTH] for output in outputs]).T), 1)
    wanted = expected(setting, logits_after_output) * len(outputs)
    statistic, freedom = chi_square(counts, wanted)
    return TrialOutcome(
        case,
        len(outputs) * LENGTH,
        statistic,
        freedom,
        survival(statistic, freedom),
        sum(map(len, outputs)) / num_passes,
    )


def _decoded(decoder: Decoder, count: int) -> tuple[list[list[int]], int]:
    """Return outputs, and the passes behind their prompts' that they took.

    The prompt's pass gives the first token; one more than is looked at leaves room for drafts.
    """
    outputs, num_passes = [], 0
    for _ in range(count):
        generation = decoder.generate(PROMPT, LENGTH + 1)
        outputs.append([token for step in generation for token in step])
        num_passes += generation.statistics.num_passes
    return outputs, num_passes


def _decoded_together(decoder: Decoder, count: int) -> tuple[list[list[int]], int]:
    """Return the same of every second sequence; the others have another prompt."""
    prompts = [(PROMPT, _NEIGHBOURS_PROMPT)[number % 2] for number in range(2 * count)]
    requests = [Request(prompt, LENGTH + 1) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in requests]
    num_passes = 0
    for generation, tokens in decoder.generate_many(requests, _PARALLEL):
        outputs[generation.number].extend(tokens)
        if generation.is_over and generation.number % 2 == 0:
            num_passes += generation.statistics.num_passes
    return outputs[::2], num_passes


class _Opened:
    """A fused drafter over retrieval that has to be shut down."""

    def __init__(self, drafter: "ChangedFusion", retrieval: EmbeddedDrafter) -> None:
        self.drafter = drafter
        self._retrieval = retrieval

    def close(self) -> None:
        """Shut retrieval down."""
        self._retrieval.shut_down()


def _opened(setting: Setting, kind: str, seed: int, change: Change) -> _Opened:
    """Return all that drafts, the model that draws first."""
    sampling, retrieval = setting.sampling, EmbeddedDrafter()
    readers: list[TreeReader] = [
        Speculator(_small_head(), small_model(0), name="a small head"),
        ModelReader(DraftModel(small_model(1))),
    ]
    if kind != kind_of(DRAWING[0]):
        readers.reverse()
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    draws = Draws(sampling.temperature, sampling.top_k or None, top_p, seed + 1)
    drafter = ChangedFusion(
        [retrieval],
        DraftLimits(SIZE),
        readers=readers,
        draws=draws,
        recycled=RecycledLogits(_RECYCLED),
        costs=FREE,
    )
    drafter.change = change
    return _Opened(drafter, retrieval)


class ChangedFusion(DrawnFusion):
    """A fused drafter in whose drafts an error may be planted.

    Attributes:
        change: what is made of a draft.
    """

    change: Change
    _kinds: frozenset[bool] = frozenset()

    def check_kinds(self) -> None:
        """Refuse drafts that do not test the merge.

        Raises:
            ValueError: all nodes were certain, or all were drawn.
        """
        if self._kinds != {True, False}:
            raise ValueError("drafts held no certain nodes, or none that were drawn")

    def fuse(self, sequence: FusedSequence, budget_nodes: int, min_probability: float) -> DraftTree:
        """Draft as ever, and change what was drawn."""
        tree = super().fuse(sequence, budget_nodes, min_probability)
        if not isinstance(tree, SampledTree):
            return tree
        self._kinds |= set((tree.rows == CERTAIN).tolist())
        return self.change(tree) if len(tree.proposals) else tree


def without_draws_of_some(tree: SampledTree) -> SampledTree:
    """Drop draws by their value: those of the first two tokens."""
    kept = np.zeros(len(tree), np.bool_)
    for node, parent in enumerate(tree.parents.tolist()):
        stays = tree.rows[node] == CERTAIN or tree.token_ids[node] > 1
        kept[node] = stays and (parent < 0 or kept[parent])
    return tree.among(kept)


def with_others_proposals(tree: SampledTree) -> SampledTree:
    """Tell that draws came from another node's distribution."""
    return _told(tree, tree.proposals.flip(0))


def with_flat_proposals(tree: SampledTree) -> SampledTree:
    """Tell that draws came from a flat distribution."""
    return _told(tree, torch.full_like(tree.proposals, 1 / SIZE))


def _told(tree: SampledTree, proposals: torch.Tensor) -> SampledTree:
    return SampledTree(
        tree.token_ids, tree.parents, tree.probabilities, tree.sources, proposals, tree.rows
    )


PLANTED_IN_TREES: Final[dict[str, Change]] = {
    "drawn nodes dropped by their value": without_draws_of_some,
    "proposals of other nodes": with_others_proposals,
    "proposals that were not drawn from": with_flat_proposals,
}
"""What is wrong with a fused draft, which the tests must find."""

PLANTED_CASE: Final = Case("temperature 1", SHAPE, kind_of(DRAWING[1]), coupled=False)
"""Where errors are planted: its draws differ from the target's own by enough to tell."""


class MixingUp(Target):
    """A target that gives sequences of a pass what belongs to their neighbours."""

    def read(self, readings: Sequence[Reading]) -> list[Read]:
        """See `Target`."""
        reads = super().read(readings)
        for at in range(1, len(reads)):
            if reads[at - 1][0].shape == reads[at][0].shape:
                reads[at - 1], reads[at] = reads[at], reads[at - 1]
        return reads


MIXED_UP_CASE: Final = replace(PLANTED_CASE, shape=SHARED)


def run_planted_in_trees(draws: int) -> dict[str, TrialOutcome]:
    """Test every planted error."""
    found = {
        error: run_fused(PLANTED_CASE, draws, change=change)
        for error, change in PLANTED_IN_TREES.items()
    }
    found["sequences of a pass mixed up"] = run_fused(MIXED_UP_CASE, draws, verify=MixingUp)
    return found


@cache
def small_model(seed: int) -> PreTrainedModel:
    """Return a model of `SIZE` tokens that says something else after each text."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=_NUM_LAYERS,
        initializer_range=0.35,
        vocab_size=SIZE,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def _small_head() -> Eagle3Head:
    """Return a head that drafts all tokens but the last, and not evenly."""
    torch.manual_seed(2)
    shape = EagleConfig(
        kind=EagleKind.EAGLE3,
        layer=LlamaConfig(
            hidden_size=_WIDTH,
            intermediate_size=2 * _WIDTH,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_hidden_layers=1,
            vocab_size=SIZE,
            max_position_embeddings=64,
        ),
        states=(0, 1, _NUM_LAYERS),
        target_size=_WIDTH,
        draft_vocabulary=SIZE - 1,
    )
    head = Eagle3Head(shape)
    head.keep(torch.arange(SIZE - 1))
    output: Any = head.lm_head
    torch.nn.init.normal_(output.weight, std=1.0)
    return head


def logits_after_output(output: Sequence[int]) -> NDArray[np.float64]:
    """Return float64[SIZE], the target's logits after the prompt and some output."""
    return _logits_by_output()[tuple(output)]


@cache
def _logits_by_output() -> dict[tuple[int, ...], NDArray[np.float64]]:
    """Return the target's logits after each output shorter than `LENGTH`."""
    found: dict[tuple[int, ...], NDArray[np.float64]] = {}
    paths: list[tuple[int, ...]] = [()]
    for _ in range(LENGTH):
        tokens = torch.tensor([[*PROMPT, *path] for path in paths])
        with torch.inference_mode():
            logits = small_model(0)(input_ids=tokens, use_cache=False).logits[:, -1]
        found |= dict(zip(paths, logits.double().numpy(), strict=True))
        paths = [(*path, token) for path in paths for token in range(SIZE)]
    return found
