"""Messages whose size tells little: replies of what is drafted, requests of what was decoded."""

from collections.abc import Iterable
from typing import Final

from retriever.v1 import retriever_pb2 as pb

_NODE_BYTES: Final = 5 + 3 + 4 + 1
"""At most, of a node on the wire: token id, parent, probability, source."""

_TREE_BYTES: Final = 32
"""At most, of a tree without its nodes: tags and lengths."""

_LEAST_REQUEST_BYTES: Final = 256
_LEAST_NODES: Final = 16
_OTHERS_BYTES: Final = 32


def pad(response: pb.DraftStreamResponse | pb.DraftResponse, budgets: Iterable[int]) -> None:
    """Add bytes to a response until its size depends on what was asked alone.

    Every tree counts as if it had all the nodes of the largest budget, rounded up to a power of
    two, so that steps of slightly different budgets look alike. A reply that refuses something
    says why, and may be longer.

    Args:
        response: not padded yet.
        budgets: of its trees, in nodes.
    """
    asked = list(budgets)
    nodes = max(_LEAST_NODES, 1 << (max(asked, default=0) - 1).bit_length())
    size = _OTHERS_BYTES + len(asked) * (_TREE_BYTES + nodes * _NODE_BYTES)
    _fill(response, size)


def pad_request(message: pb.DraftStreamRequest) -> None:
    """Add bytes to a message until its size is a power of two, from 256 bytes.

    Which power that is still tells a long prompt from a short one, and a step of many sequences
    from one of few.
    """
    size = message.ByteSize()
    fitting = max(_LEAST_REQUEST_BYTES, 1 << (size - 1).bit_length())
    _fill(message, fitting if fitting - size != 1 else 2 * fitting)  # no padding takes one byte


def _fill(
    message: pb.DraftStreamRequest | pb.DraftStreamResponse | pb.DraftResponse, size: int
) -> None:
    """Add padding until a message has so many bytes, if it has less."""
    missing = size - message.ByteSize()
    if missing < 2:  # noqa: PLR2004  (the least that a padding takes)
        return
    length = _length_of(missing)
    if length is None:  # where the length itself takes a byte more, one size cannot be met
        length = _length_of(missing - 2)
        message.padding.append(b"")
    if length is not None:
        message.padding.append(bytes(length))


def _length_of(num_bytes: int) -> int | None:
    """Return how long a padding is that takes so many bytes on the wire; None where none does."""
    for length_bytes in range(1, 5):
        length = num_bytes - 1 - length_bytes
        if length >= 0 and max(1, -(-length.bit_length() // 7)) == length_bytes:
            return length
    return None
