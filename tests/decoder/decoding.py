"""Tiny models, scripted drafters and trees that the decoder's tests share."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decoder.budget.budget import FixedBudget
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.recycling import RecycledLogits
from decoder.loop import Decoder
from decoder.model.capability_check import Verdicts
from decoder.model.target import Target
from retriever.drafter import DEFAULT, Drafter, DraftRequest, SequenceOptions, TokenIds
from retriever.errors import OutOfSequenceError, SessionExistsError, UnknownSessionError
from retriever.follower import DraftLimits, Followers
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import ROOT, DraftTree, Source

VOCABULARY = 48
WINDOW = 8
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,  # or else all models would repeat a single token
}
"""Sizes of a tiny model, as the configurations of most architectures call them."""

Guess = Callable[[list[int], int], DraftTree]


class DoubleNorm(nn.Module):
    """A root mean square norm in double precision throughout.

    transformers' own norms round to single precision in models of double, too: what differs in
    the last bit mostly rounds to the same value, and on another processor to the one beside it.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._least = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        self._offset = 1.0 if isinstance(norm, Gemma3RMSNorm) else 0.0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        squares = states.pow(2).mean(-1, keepdim=True)
        scale: torch.Tensor = self._offset + self.weight
        return states * torch.rsqrt(squares + self._least) * scale


def evaluated(model: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model of a dtype, in evaluation mode; its own methods have no types.

    Where it is double, all of it is but eager attention and what depends on positions alone.
    """
    converted: PreTrainedModel = model.to(dtype).eval()
    if dtype == torch.float64:
        for name, module in list(converted.named_modules()):
            if isinstance(module, (LlamaRMSNorm, Gemma3RMSNorm)):
                converted.set_submodule(name, DoubleNorm(module).eval())
    return converted


def tiny_llama(
    attention: str = "sdpa", dtype: torch.dtype = torch.float32, layers: int = 2
) -> PreTrainedModel:
    torch.manual_seed(1)
    options: Any = {"attn_implementation": attention}  # taken, though not in the signature
    config = LlamaConfig(
        **SIZES,
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        max_position_embeddings=256,
        eos_token_id=None,
        dtype=dtype,
        **options,
    )
    return evaluated(LlamaForCausalLM(config), dtype)


def tiny_gemma(
    attention: str = "sdpa", dtype: torch.dtype = torch.float32, layers: int = 2
) -> PreTrainedModel:
    torch.manual_seed(2)
    options: Any = {"attn_implementation": attention}
    config = Gemma3TextConfig(
        **SIZES,
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        head_dim=8,
        query_pre_attn_scalar=8,
        tie_word_embeddings=False,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"][:layers],
        max_position_embeddings=256,
        eos_token_id=None,
        dtype=dtype,
        use_cache=True,
        **options,
    )
    return evaluated(Gemma3ForCausalLM(config), dtype)


def tiny_mamba() -> PreTrainedModel:
    torch.manual_seed(3)
    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        initializer_range=0.4,
        eos_token_id=None,
    )
    return evaluated(MambaForCausalLM(config))


def tiny_convolution() -> PreTrainedModel:
    torch.manual_seed(5)
    config = Lfm2Config(
        **SIZES,
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
        layer_types=["conv", "full_attention"],
        eos_token_id=None,
    )
    return evaluated(Lfm2ForCausalLM(config))


MODELS = {"llama": tiny_llama, "gemma": tiny_gemma}


def prompt_of(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(4, vocabulary, length).tolist()
    return drawn


def plainly(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, stop: int | None = None
) -> list[int]:
    """Return what transformers itself generates greedily."""
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=stop, pad_token_id=0
    )
    tokens = torch.tensor([prompt])
    generate: Any = model.generate
    output = generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    generated: list[int] = output[0, len(prompt) :].tolist()
    return generated


def fused(*drafters: Drafter) -> FusedDrafter:
    """Return a drafter with recycled logits; it drafts from this process's memory if not told."""
    return FusedDrafter(
        drafters or [EmbeddedDrafter()],
        DraftLimits(VOCABULARY, VOCABULARY),
        recycled=RecycledLogits(),
        patience_s=PATIENT_S,
    )


def decoder_with(
    model: PreTrainedModel, drafter: Drafter, *, verdicts: Verdicts | None = None, **options: Any
) -> Decoder:
    """Return a decoder; what the model verifies is not tried unless verdicts are kept somewhere."""
    return Decoder(Target(model, verdicts=verdicts), drafter, FixedBudget(64), **options)


PATIENT_S = 1e9
"""How long drafters are taken to take, so that they are waited for however busy the machine is."""


def decoder_ahead(model: Any, drafter: Drafter, nodes: int = 8, **options: Any) -> Decoder:
    """Return a decoder that waits for answers ahead; a fused drafter waits for its own members."""
    target = Target(model, verdicts=None)
    decoder = Decoder(target, drafter, FixedBudget(nodes), num_ahead=16, **options)
    decoder.followers = Followers(drafter, decoder.followers.limits, patience_s=PATIENT_S)
    return decoder


def decoded(decoder: Decoder, prompt: list[int], max_new_tokens: int) -> list[int]:
    return [token for step in decoder.generate(prompt, max_new_tokens) for token in step]


def tree_of(edges: Sequence[tuple[int, int]], source: Source = Source.CONTEXT) -> DraftTree:
    """Build a tree of (parent, token) edges with falling probabilities."""
    count = len(edges)
    return DraftTree.checked(
        [token for _, token in edges],
        [parent for parent, _ in edges],
        np.linspace(0.9, 0.1, count),
        np.full(count, source),
    )


def random_tree(
    rng: np.random.Generator, num_nodes: int, vocabulary: int = VOCABULARY
) -> DraftTree:
    """Return a tree of any shape: chains, bushes and all between."""
    edges: list[tuple[int, int]] = []
    reach = int(rng.integers(1, 4))
    while len(edges) < num_nodes:
        lowest = -1 if reach == 1 else max(-1, len(edges) - 1 - reach * 4)
        edge = (int(rng.integers(lowest, len(edges))), int(rng.integers(0, vocabulary)))
        if edge not in edges:
            edges.append(edge)
    return tree_of(edges)


def oracle_tree(
    rng: np.random.Generator, truth: list[int], num_nodes: int, vocabulary: int = VOCABULARY
) -> DraftTree:
    """Return a tree that holds the true continuation among wrong branches at every depth."""
    edges: list[tuple[int, int]] = []
    true_nodes = [ROOT]
    while len(edges) < num_nodes:
        depth = len(true_nodes) - 1
        if depth < len(truth) and rng.random() < 0.4:
            edge = (true_nodes[-1], truth[depth])
        else:
            edge = (int(rng.integers(-1, len(edges))), int(rng.integers(0, vocabulary)))
        if edge in edges:
            continue
        edges.append(edge)
        if depth < len(truth) and edge == (true_nodes[-1], truth[depth]):
            true_nodes.append(len(edges) - 1)
    return tree_of(edges)


class ScriptedDrafter:
    """Drafts by a function of (tokens so far, budget) and keeps to the protocol strictly."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self.open_sessions: dict[str, list[int]] = {}
        self.closed: list[list[int]] = []
        self.num_drafts = 0
        self.remembers: dict[str, bool] = {}

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        if session in self.open_sessions:
            raise SessionExistsError(session)
        assert prompt.dtype == np.int32
        self.remembers[session] = options.remember
        self.open_sessions[session] = prompt.tolist()

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._answer(request) for request in requests]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        if session not in self.open_sessions:
            raise UnknownSessionError(session)
        new = [] if new_tokens is None else new_tokens.tolist()
        self.closed.append(self.open_sessions.pop(session) + new)

    def _answer(self, request: DraftRequest) -> DraftTree:
        if request.session not in self.open_sessions:
            raise UnknownSessionError(request.session)
        tokens = self.open_sessions[request.session]
        if len(tokens) + len(request.new_tokens) != request.length:
            raise OutOfSequenceError(request.session)
        tokens.extend(request.new_tokens.tolist())
        self.num_drafts += 1
        return self._guess(tokens, request.budget_nodes)


class AheadDrafter(ScriptedDrafter):
    """A scripted drafter that answers ahead: by its function of the tokens that may come."""

    def __init__(self, guess: Guess) -> None:
        super().__init__(guess)
        self.num_ahead = self.num_outcomes = 0
        self.outcomes: tuple[TokenIds, ...] = ()

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float = math.inf
    ) -> list[list[DraftTree]]:
        assert timeout_s > 0
        self.num_ahead += 1
        answers = []
        for request in requests:
            self._answer(request._replace(budget_nodes=0))
            self.num_outcomes += len(request.outcomes)
            self.outcomes = request.outcomes
            tokens = self.open_sessions[request.session]
            answers.append(
                [
                    self._guess([*tokens, *outcome.tolist()], request.budget_nodes)
                    for outcome in request.outcomes
                ]
            )
        return answers


def nothing(_tokens: list[int], _budget: int) -> DraftTree:
    return DraftTree.empty()


def oracle(truth: list[int], num_nodes: int = 24, seed: int = 0) -> Guess:
    """Draft from the whole true sequence, prompt included."""
    rng = np.random.default_rng(seed)
    return lambda tokens, _: oracle_tree(rng, truth[len(tokens) :], num_nodes)


def at_random(num_nodes: int = 24, seed: int = 0) -> Guess:
    rng = np.random.default_rng(seed)
    return lambda _tokens, _budget: random_tree(rng, num_nodes)


def every_token(_tokens: list[int], _budget: int) -> DraftTree:
    """Draft the whole vocabulary as the next token: one of its nodes is always right."""
    return tree_of([(ROOT, token) for token in range(VOCABULARY)])


def by_tokens(truths: Sequence[tuple[list[int], list[int]]], rightness: float) -> Guess:
    """Draft what comes among wrong branches, or anything; the same after the same tokens."""

    def guess(tokens: list[int], budget: int) -> DraftTree:
        rng = np.random.default_rng(abs(hash(tuple(tokens))))
        for prompt, truth in truths:
            if tokens[: len(prompt)] == prompt and rng.random() < rightness:
                return oracle_tree(rng, truth[len(tokens) - len(prompt) :], min(budget, 20))
        return random_tree(rng, min(budget, int(rng.integers(0, 16))))

    return guess
