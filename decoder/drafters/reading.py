"""Models that read a draft tree while it grows.

Such a model does two things in one pass: it proposes children of the nodes that it reads, and says
how probable the children are that others proposed. A draft model is one, which reads tokens; a
speculator another, which reads the target's states as well.
"""

from typing import TYPE_CHECKING, Protocol

from decoder.drafters.following import Verified
from retriever.drafter import TokenIds
from retriever.sequences import TokenSequence
from retriever.tree import Source

if TYPE_CHECKING:
    import torch


class SequenceReader(Protocol):
    """A model's reading of one sequence and of the tree that is being drafted behind it.

    It shares the sequence with whoever commits to it.
    """

    def begin(self) -> "torch.Tensor | None":
        """Catch up with the committed sequence, and drop the tree that was read last.

        Returns:
            [1, C], logits over `TreeReader.columns` after the last committed token; `None` where
            there is nothing to say, as before the target's first states are known.

        Raises:
            DrafterUnavailableError: the sequence is too long for the model, or memory ran out.
        """
        ...

    def read(self, tokens: list[int], parents: list[int]) -> "torch.Tensor":
        """Read nodes behind the sequence in one pass.

        Args:
            tokens: of n nodes, at least one.
            parents: their parents, numbered in the order in which nodes were read since `begin`,
                or `ROOT`. Where `reads_paths` is not set, none is among the n nodes themselves.

        Returns:
            [n, C], logits after each node.
        """
        ...

    def learn(self, verified: Verified) -> None:
        """Take in a pass of the target, before its path is committed."""
        ...

    def close(self) -> None:
        """Forget the sequence."""
        ...


class TreeReader(Protocol):
    """A model that reads trees, of any number of sequences; not to be used by two threads.

    Attributes:
        name: in messages.
        columns: int32[C], rising, the token that each column of its logits stands for.
        max_depth: nodes deeper than this are not read; `None` for no limit.
        reads_paths: whether a node and its parent can be read in one pass.
        states: numbers of the target's states that it needs; see `decoder.model.states`.
        source: what its own proposals are labelled with.
    """

    name: str
    columns: TokenIds
    max_depth: int | None
    reads_paths: bool
    states: frozenset[int]
    source: Source

    def follow(self, sequence: TokenSequence) -> SequenceReader:
        """Return the reading of a sequence, of which nothing has been read."""
        ...
