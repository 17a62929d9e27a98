"""Padding of messages, so that replies hide what was drafted and requests what was decoded."""

from collections.abc import Iterable
from typing import Final

from retriever.v1 import retriever_pb2 as pb

_NODE_BYTES: Final = 5 + 3 + 4 + 1
"""Largest size of a node on the wire: token id, parent, probability, source."""

_TREE_BYTES: Final = 32
"""Largest size of a tree without its nodes: tags and lengths."""

_LEAST_REQUEST_BYTES: Final = 256
_LEAST_NODES: Final = 16
_OTHERS_BYTES: Final = 32


def pad(response: pb.DraftStreamResponse | pb.DraftResponse, budgets: Iterable[int]) -> None:
    """Pad a response to a size that depends on the request alone.

    Every tree counts with all nodes of the largest budget, rounded up to a power of two, so that
    similar budgets have equal sizes. A reply with a refusal holds its reason, and may be longer.

    Args:
        response: not padded yet.
        budgets: of its trees, in nodes.
    """
    asked = list(budgets)
    nodes = max(_LEAST_NODES, 1 << (max(asked, default=0) - 1).bit_length())
    size = _OTHERS_BYTES + len(asked) * (_TREE_BYTES + nodes * _NODE_BYTES)
    _fill(response, size)


def pad_request(message: pb.DraftStreamRequest) -> None:
    """Pad a message to a power of two, from 256 bytes.

    The power still distinguishes long from short prompts, and large from small steps.
    """
    size = message.ByteSize()
    fitting = max(_LEAST_REQUEST_BYTES, 1 << (size - 1).bit_length())
    _fill(
        message, fitting if fitting - size != 1 else 2 * fitting
    )  # a padding takes 2 bytes or more


def _fill(
    message: pb.DraftStreamRequest | pb.DraftStreamResponse | pb.DraftResponse, size: int
) -> None:
    """Pad a message to a size, if it is smaller."""
    missing = size - message.ByteSize()
    if missing < 2:  # noqa: PLR2004  (the least that a padding takes)
        return
    length = _length_of(missing)
    if length is None:  # one size cannot be met: where the length takes one byte more
        length = _length_of(missing - 2)
        message.padding.append(b"")
    if length is not None:
        message.padding.append(bytes(length))


def _length_of(num_bytes: int) -> int | None:
    """Return the length of a padding that takes `num_bytes` on the wire; None if there is none."""
    for length_bytes in range(1, 5):
        length = num_bytes - 1 - length_bytes
        if length >= 0 and max(1, -(-length.bit_length() // 7)) == length_bytes:
            return length
    return None
