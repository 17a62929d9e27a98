"""A target that is a pure function of its context, requests, and steps as SGLang makes them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decoder.plugins.experimental_sglang.corpus import DrafterCorpus
from tests.decoder.plugins.experimental_sglang.tree_verification import (
    Ints,
    Verify,
    links_of,
    verify_greedy,
)

NUM_TOKENS = 50


def chosen(context: Sequence[int]) -> int:
    """The target's choice: text that mostly repeats, with a turn now and then."""
    if len(context) % 17 == 0:
        return (context[0] + len(context)) % NUM_TOKENS
    return (3 * context[-1] + context[-2] + 1) % 7


def plain(prompt: Sequence[int], num_tokens: int) -> list[int]:
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(chosen(context))
    return context[len(prompt) :]


@dataclass(eq=False)
class Request:
    """What is read of SGLang's `Req`; its token ids are arrays there, too."""

    rid: str
    origin_input_ids_unpadded: "array[int]"
    output_ids: "array[int]" = field(default_factory=lambda: array("q"))

    @classmethod
    def of(cls, rid: str, prompt: Sequence[int]) -> "Request":
        """After its prefill, which brings the first token."""
        return cls(rid, array("q", prompt), array("q", [chosen(prompt)]))

    @property
    def tokens(self) -> list[int]:
        return [*self.origin_input_ids_unpadded, *self.output_ids]


def committed(
    context: Sequence[int], row: Ints, mask: Ints, verify: Verify = verify_greedy
) -> list[int]:
    """The tokens that verification of a row adds to a context."""
    above = [np.flatnonzero(seen)[1:].tolist() if seen[0] else [] for seen in mask]
    target = np.array([chosen([*context, *row[nodes].tolist()]) for nodes in above])
    path = verify(row, links_of(mask), target)
    return [*row[path[1:]].tolist(), int(target[path[-1]])]


def step(corpus: DrafterCorpus, requests: Sequence[Request], width: int, depth: int = 18) -> None:
    """One step of the engine as its scheduler makes it without overlap."""
    corpus.show(requests)
    corpus.synchronize()
    tokens, masks = corpus.batch_get(
        [request.rid for request in requests],
        [request.tokens[-depth:] for request in requests],
        [len(request.tokens) for request in requests],
    )
    assert tokens.dtype == masks.dtype == np.int64
    rows = tokens.reshape(len(requests), width)
    for request, row, mask in zip(
        requests, rows, masks.reshape(len(requests), width, width), strict=True
    ):
        assert row[0] == request.tokens[-1]
        request.output_ids.extend(committed(request.tokens, row, mask))
    corpus.batch_put([request.tokens[-depth:] for request in requests])
