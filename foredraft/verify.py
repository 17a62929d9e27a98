"""Verifies draft trees in a decoding loop of your own.

A tree of N nodes takes one forward pass of 1 + N rows. The first row is the last token, which the
model has not read yet. The nodes follow in order. Each row attends to the context, its ancestors
and itself. A row's position is the last token's position plus the row's depth in the tree. The
model's logits then decide which nodes are accepted. Only the keys and values of the last token and
of the accepted nodes stay in the KV cache.

    tokens = verify.tokens(last_token, tree)
    mask = verify.mask(tree, past)              # or additive_mask
    positions = verify.positions(tree, past)
    ...                                         # one pass of the model
    path, token = verify.accept_greedy(tree, logits)
    rows = verify.kept_rows(path)

Only `additive_mask` and the two rules that take logits need more than numpy.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.model.tree_rows import TreeRows
from decoder.sampling.walk import Acceptance, follow
from foredraft.installation import needing
from retriever.tree import DraftTree

if TYPE_CHECKING:
    import torch

    from decoder.sampling.sampling_settings import SamplingSettings

__all__ = [
    "accept",
    "accept_greedy",
    "accept_sampled",
    "additive_mask",
    "kept_rows",
    "mask",
    "positions",
    "tokens",
]


_NUM_AXES: Final = 2  # axes of logits: rows and tokens


def tokens(last_token: int, tree: DraftTree) -> NDArray[np.int64]:
    """Return int64[1 + N], the input of a pass: the sequence's last token, then the nodes."""
    return np.concatenate([[last_token], tree.token_ids]).astype(np.int64)


def mask(tree: DraftTree, past: int, window: int | None = None) -> NDArray[np.bool_]:
    """Return bool[1 + N, past + 1 + N]: for each row, which keys it may attend to.

    Args:
        tree: draft tree of the pass.
        past: number of tokens before the last token; their keys come first.
        window: number of positions that each row attends to, including its own; `None` for all.
    """
    return TreeRows.behind_token(tree, past).seen(window=window)


def additive_mask(
    tree: DraftTree,
    past: int,
    dtype: "torch.dtype",
    window: int | None = None,
    device: "torch.device | str" = "cpu",
) -> "torch.Tensor":
    """Return dtype[1, 1, 1 + N, past + 1 + N] to add to the scores; zero where `mask` is true."""
    with needing("decoder"):
        import torch  # noqa: PLC0415  the other functions do not need torch

        from decoder.model.attention import additive  # noqa: PLC0415
    return additive(torch.from_numpy(mask(tree, past, window)).to(device), dtype)[None, None]


def positions(tree: DraftTree, past: int) -> NDArray[np.int64]:
    """Return int64[1 + N], each row's position in the sequence; siblings share a position."""
    return TreeRows.behind_token(tree, past).positions


def accept(tree: DraftTree, choices: Sequence[int] | NDArray[np.integer[Any]]) -> Acceptance:
    """Follow the tree along the target's choices. Works with any framework.

    If the choices are the most probable tokens, this is greedy decoding. If they are sampled from
    the target's distribution after each row, this is exact sampling, whatever the draft. It is
    speculative sampling with drafts that are certain of their tokens (Leviathan et al., 2023,
    arXiv:2211.17192).

    Args:
        tree: draft tree of the pass.
        choices: int[1 + N], the target's choice after the last token and after each node.

    Returns:
        int64[k], the accepted nodes from the root down, and the token that follows them.

    Raises:
        ValueError: the number of choices differs from the number of rows.
    """
    chosen = np.asarray(choices)
    if chosen.shape != (len(tree) + 1,):
        raise ValueError(f"{chosen.shape} choices for a pass of {len(tree) + 1} rows")
    return follow(tree, lambda rows: chosen[rows], together=True)


def accept_greedy(tree: DraftTree, logits: "torch.Tensor | NDArray[Any]") -> Acceptance:
    """Accept the path of the most probable tokens; see `accept`.

    Args:
        tree: draft tree of the pass.
        logits: [1 + N, vocabulary], one row for each row of the pass; a torch tensor on any device,
            or a numpy array.

    Raises:
        ValueError: `logits` does not have one row for each row of the pass.
    """
    best: Any = logits.argmax(-1)
    return accept(tree, best if isinstance(best, np.ndarray) else best.cpu().numpy())


def accept_sampled(
    tree: DraftTree,
    logits: "torch.Tensor | NDArray[Any]",
    settings: "SamplingSettings",
    points: Sequence[float] | NDArray[np.float64],
) -> Acceptance:
    """Accept the path of tokens sampled from the target's distribution; see `accept`.

    Args:
        tree: draft tree of the pass.
        logits: [1 + N, vocabulary], one row for each row of the pass; a torch tensor on any device,
            or a numpy array.
        settings: temperature above 0, top-k, top-p and min-p. Penalties are not supported, because
            they need the output so far.
        points: float64[1 + greatest depth] or more, random numbers in [0, 1), one for each position
            after the last token. They must not be used for anything else.

    Raises:
        ValueError: `logits` does not have one row for each row of the pass, there are too few
            points, or a setting is not supported.
    """
    with needing("decoder"):
        import torch  # noqa: PLC0415  as above

        from decoder.sampling.choice import Draw  # noqa: PLC0415
        from decoder.sampling.processors import Processing, Warping  # noqa: PLC0415
    if settings.is_greedy or not Processing(settings, (), None).is_of_settings:
        raise ValueError("sampling supports only a temperature above 0, top-k, top-p and min-p")
    scores = torch.as_tensor(logits)
    if scores.ndim != _NUM_AXES or len(scores) != len(tree) + 1:
        raise ValueError(f"logits {tuple(scores.shape)} for a pass of {len(tree) + 1} rows")
    depths = TreeRows.behind_token(tree, 0).depths
    if len(points) <= depths.max():
        raise ValueError(f"{len(points)} points for a tree of depth {depths.max()}")
    warp, draw = Warping(settings), Draw(depths, np.asarray(points, np.float64))

    def choose(rows: slice) -> "torch.Tensor":
        return draw(warp(scores[rows].to(torch.float32, copy=True)), rows)

    return follow(tree, choose, together=False)


def kept_rows(path: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64[1 + k], the rows of the pass whose keys and values stay, in order."""
    return np.concatenate([[0], path + 1])
