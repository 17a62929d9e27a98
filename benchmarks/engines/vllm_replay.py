"""Replays of vLLM's own methods and of ours on recorded outputs, without a model.

A draft changes no greedy output, so the output alone determines the steps of a method. The methods
are vLLM's own code, and are called as vLLM calls them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any, Final

import numpy as np

from retriever.drafter import DraftRequest, TokenIds
from retriever.sessions.embedded import EmbeddedDrafter

Tokens = list[int]
Settings = tuple[float, ...]
Propose = Callable[[TokenIds, int], Sequence[int]]
"""Proposes tokens after a sequence, int32[n]; the number is how many of its last tokens are new."""

NGRAM: Final = tuple(
    each for each in product((5, 8, 16, 32), (1, 2, 3, 5), (1, 2, 3, 5)) if each[1] <= each[2]
)
SUFFIX: Final = tuple(product((8, 16, 32), (24, 64), (1.0, 2.0, 4.0, 8.0), (0.0, 0.1)))
OURS: Final = tuple(product((8, 16, 32), (32, 64, 128)))


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts with their outputs.

    Attributes:
        warm: earlier pairs, which methods may draft from.
        measured: pairs to replay.
    """

    warm: Sequence[tuple[Tokens, Tokens]]
    measured: Sequence[tuple[Tokens, Tokens]]


def num_steps(propose: Propose, prompt: Tokens, output: Tokens) -> int:
    """Return the number of steps for an output, including the prompt's step."""
    sequence = np.array(prompt + output, np.int32)
    done, steps, num_new = 1, 1, 1
    while done < len(output):
        chain = propose(sequence[: len(prompt) + done], num_new)
        accepted = 0
        for token, real in zip(chain, output[done:], strict=False):
            if token != real:
                break
            accepted += 1
        num_new = min(accepted + 1, len(output) - done)
        done += num_new
        steps += 1
    return steps


def ngram(texts: Texts, num_tokens: int, shortest: int, longest: int) -> float:
    """Return tokens per step of vLLM's `ngram`."""
    from vllm.v1.spec_decode import ngram_proposer  # noqa: PLC0415  in vLLM's environment alone

    find: Any = ngram_proposer._find_longest_matched_ngram_and_propose_tokens  # noqa: SLF001

    def propose(tokens: TokenIds, _num_new: int) -> Sequence[int]:
        chain: Sequence[int] = find(tokens, shortest, longest, 1 << 20, num_tokens).tolist()
        return chain

    steps = [num_steps(propose, *pair) for pair in texts.measured]
    return sum(len(output) for _, output in texts.measured) / sum(steps)


def suffix(texts: Texts, num_tokens: int, depth: int, factor: float, probability: float) -> float:
    """Return tokens per step of vLLM's `suffix`, with the warm-up outputs in its cache."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache  # noqa: PLC0415  as above

    cache: Any = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=10_000)
    for number, (prompt, output) in enumerate(texts.warm):
        cache.start_request(-1 - number, np.array(prompt, np.int32))
        cache.add_active_response(-1 - number, output)
        cache.stop_request(-1 - number)
    steps = 0
    for number, (prompt, output) in enumerate(texts.measured):
        cache.start_request(number, np.array(prompt, np.int32))

        def propose(tokens: TokenIds, num_new: int, number: int = number) -> Sequence[int]:
            cache.add_active_response(number, tokens[len(tokens) - num_new :].tolist())
            draft = cache.speculate(
                number,
                tokens[-depth:],
                max_spec_tokens=num_tokens,
                max_spec_factor=factor,
                min_token_prob=probability,
            )
            chain: Sequence[int] = draft.token_ids
            return chain

        steps += num_steps(propose, prompt, output)
        cache.stop_request(number)
    return sum(len(output) for _, output in texts.measured) / steps


def ours(texts: Texts, indexes: Sequence[Path], num_tokens: int, budget_nodes: int) -> float:
    """Return tokens per step of our drafts, with the warm-up outputs stored."""
    drafter = EmbeddedDrafter.open_indexes(indexes)
    for number, (prompt, output) in enumerate(texts.warm):
        drafter.open(f"warm-{number}", prompt)
        drafter.close(f"warm-{number}", output)
    steps, names = 0, count()
    for prompt, output in texts.measured:
        name = str(next(names))
        drafter.open(name, prompt)

        def propose(tokens: TokenIds, num_new: int, name: str = name) -> Sequence[int]:
            new = tokens[len(tokens) - num_new :]
            request = DraftRequest(name, new, len(tokens), budget_nodes)
            chain = drafter.draft([request])[0].best_chain(num_tokens).token_ids.tolist()
            return list(chain)

        steps += num_steps(propose, prompt, output)
        drafter.close(name)
    drafter.shut_down()
    return sum(len(output) for _, output in texts.measured) / steps
