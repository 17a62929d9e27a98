"""A draft model's head that computes only the frequent part of the vocabulary.

FR-Spec (Zhao et al., 2025, arXiv:2502.14856): most of a small model's time goes into its head,
and most of what it drafts is frequent. Output stays the target's, which verifies.
"""

from logging import getLogger
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from retriever.drafter import TokenIds

_log = getLogger(__name__)

_ROUNDING: Final = 16
"""In units of the dtype's precision: by how much two ways to the same logits may differ."""

_PROBE_TOKENS: Final = 4
_HIDDEN_CHANGES: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings that change logits behind the head, which a probe may be too small to show."""


class TrimmedHead:
    """A model without its head, and the rows of the head for some tokens.

    Args:
        model: whose head is plain, see `has_plain_head`.
        kept: int32[n], the tokens.

    Attributes:
        base: gives the states that the head is applied to, as `last_hidden_state`.
    """

    def __init__(self, model: PreTrainedModel, kept: TokenIds) -> None:
        head = _head(model)
        rows = torch.from_numpy(kept.astype(np.int64)).to(head.weight.device)
        self.base = model.base_model
        self._weight = head.weight.detach()[rows]
        self._bias = None if head.bias is None else head.bias.detach()[rows]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return [rows, n], the logits of the kept tokens after states [rows, hidden size]."""
        return functional.linear(states, self._weight, self._bias)


def trimmed_head(model: PreTrainedModel, kept: TokenIds) -> TrimmedHead | None:
    """Return a model's head for some tokens, or `None`, having said so, where it is not plain."""
    if has_plain_head(model):
        return TrimmedHead(model, kept)
    _log.warning(
        "%s changes logits behind its head: it drafts with its whole vocabulary",
        type(model).__name__,
    )
    return None


@torch.inference_mode()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether logits are the last hidden states times one matrix, and nothing more."""
    head = _head(model)
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return False
    config = model.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) not in {None, 1.0} for name in _HIDDEN_CHANGES):
        return False
    probe = torch.arange(_PROBE_TOKENS, device=torch.device(model.device))[None]
    states = model.base_model(input_ids=probe, use_cache=False).last_hidden_state
    if states.shape[-1] != head.in_features:
        return False
    plain, actual = head(states), model(input_ids=probe, use_cache=False).logits
    slack = _ROUNDING * torch.finfo(actual.dtype).eps * float(actual.abs().max())
    return plain.shape == actual.shape and bool(torch.allclose(plain, actual, rtol=0, atol=slack))


def _head(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]  # not typed there
