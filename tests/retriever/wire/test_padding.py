"""With padding, the size of a reply tells nothing of its drafts."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import grpc
import numpy as np
import pytest

from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.messages import PACKED, pad, tree_to_message
from tests.retriever.security.in_process import serving


@pytest.fixture(scope="module")
def drafter(index: Path) -> Iterator[EmbeddedDrafter]:
    made = EmbeddedDrafter.open_indexes([index])
    yield made
    made.shut_down()


def chain(num_nodes: int, token: int, form: pb.TreeForm) -> pb.DraftTree:
    parents = np.arange(-1, num_nodes - 1, dtype=np.int32)
    tree = DraftTree(
        np.full(num_nodes, token, np.int32),
        parents,
        np.full(num_nodes, 0.5, np.float32),
        np.full(num_nodes, 4, np.uint8),
    )
    return tree_to_message(tree, form)


FORMS = [
    pb.TreeForm(),
    PACKED,
    pb.TreeForm(ancestors=True),
    pb.TreeForm(packed=True, ancestors=True),
]


@pytest.mark.parametrize(
    ("num_trees", "form"), [*product([1, 64], FORMS), (2, PACKED), (3, FORMS[2])]
)
def test_replies_of_a_budget_are_equal_in_size_whatever_is_drafted(
    num_trees: int, form: pb.TreeForm
) -> None:
    for budget in (1, 2, 16, 31, 32, 100, 256):
        sizes = set()
        for num_nodes in range(budget + 1):
            for token in (0, 200, (1 << 31) - 1):
                trees = [chain(num_nodes, token, form)] + [chain(0, 0, form)] * (num_trees - 1)
                response = pb.DraftStreamResponse(trees=trees, sequence_number=1 << 40)
                pad(response, [budget] * num_trees, form)
                sizes.add(response.ByteSize())
        assert len(sizes) == 1, (budget, sizes)


@pytest.mark.parametrize("pads", [False, True])
def test_a_stream_of_a_padding_service_has_one_size(
    drafter: EmbeddedDrafter,
    pads: bool,  # noqa: FBT001
) -> None:
    sizes, drafted = set(), set()
    corpus = [t for t in drafter.stats().indexes[0].segments[0].tokens[:300].tolist() if t < 50]
    with serving(drafter, pad_replies=pads) as address, grpc.insecure_channel(address) as channel:
        stub = RetrieverServiceStub(channel)
        opening = pb.OpenSessionRequest(session_id="s", prompt=corpus[:8])
        steps = [
            pb.SessionStep(session_id="s", new_token_ids=[t], length=9 + i, budget_nodes=20 + i % 9)
            for i, t in enumerate(corpus[8:60])
        ]
        messages = [
            pb.DraftStreamRequest(steps=[step], sequence_number=i + 1)
            for i, step in enumerate(steps)
        ]
        messages[0].openings.append(opening)
        for response in stub.DraftStream(iter(messages)):
            assert not response.statuses
            sizes.add(response.ByteSize())
            drafted.add(len(response.trees[0].token_ids))
        unary = {
            stub.Draft(pb.DraftRequest(context=corpus[:length], budget_nodes=24)).ByteSize()
            for length in (0, 9, 30)
        }
    assert len(drafted) > 5
    assert (len(sizes) == 1, len(unary) == 1) == (pads, pads)
