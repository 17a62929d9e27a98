"""The arithmetic of MLP speculators (Wertheimer et al., 2024, arXiv:2404.19124).

A small recurrent network over the target's last state and the tokens behind it. Each depth has an
embedding, a projection, a norm and an output layer, its own or one that all depths share.
Parameters have the names of the published files: those of fms-extras and of vLLM's
`mlp_speculator`.

The state at position t and the token at t + 1 give the state of depth 1 and the logits of the token
at t + 2; that state and the token at t + 2 give depth 2; and so on, as deep as it was trained.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from decoder.model.states import FINAL

_EPS: Final = 1e-6
_ROOT_2: Final = math.sqrt(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """The shape of an MLP speculator.

    Attributes:
        vocab_size: the target's.
        target_size: of the target's last state.
        inner_size: of its own states.
        num_depths: how many tokens it drafts one after another.
        tie_weights: whether all depths share one network, but for the first projection.
        scale_input: whether the target's state is normalised first.
    """

    vocab_size: int
    target_size: int
    inner_size: int
    num_depths: int
    tie_weights: bool = False
    scale_input: bool = False

    @property
    def states(self) -> tuple[int, ...]:
        """Numbers of the target's states that make the features: the one behind its last norm."""
        return (FINAL,)


class MlpHead(nn.Module):
    """An MLP speculator.

    Args:
        config: the shape.

    Attributes:
        config: as given.
    """

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.config = config
        inner, depths = config.inner_size, config.num_depths
        own = 1 if config.tie_weights else depths
        later = min(own, depths - 1)
        emb = [nn.Embedding(config.vocab_size, inner) for _ in range(own)]
        first = nn.Linear(config.target_size, inner, bias=False)
        proj = [nn.Linear(inner, inner, bias=False) for _ in range(later)]
        norms = [ScaledShiftedNorm(inner) for _ in range(own)]
        head = [nn.Linear(inner, config.vocab_size, bias=False) for _ in range(own)]
        self.emb = nn.ModuleList(_repeated(emb, depths))
        self.proj = nn.ModuleList([first, *_repeated(proj, depths - 1)])
        self.ln = nn.ModuleList(_repeated(norms, depths))
        self.head = nn.ModuleList(_repeated(head, depths))
        # So that by the last depth the target's state makes half of what is left.
        self._state_weight = 0.5 ** (0.5 / depths)
        self._token_weight = math.sqrt((1 - self._state_weight**2) * inner / 2)

    @property
    def hidden_size(self) -> int:
        """Of its own states."""
        return self.config.inner_size

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Return what depth 0 takes, [..., target size], for the target's last states."""
        if not self.config.scale_input:
            return features
        return functional.rms_norm(features, features.shape[-1:], eps=_EPS) / _ROOT_2

    def step(self, tokens: torch.Tensor, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Return [..., hidden size], the states one token further.

        Args:
            tokens: int64[...], the tokens behind the states.
            hidden: [..., target size] as `project` gives it at depth 0, and what this method gave
                at later ones.
            depth: from 0.
        """
        mixed = self.proj[depth](hidden) * self._state_weight
        mixed = mixed + self.emb[depth](tokens) * self._token_weight
        return functional.gelu(self.ln[depth](mixed))

    def logits(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Return [..., columns], the logits of the tokens behind the states of a depth."""
        logits: torch.Tensor = self.head[depth](hidden)
        return logits


class ScaledShiftedNorm(nn.Module):
    """A norm by the root mean square, with a weight and a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., size]."""
        return functional.rms_norm(x, x.shape[-1:], self.weight, _EPS) + self.bias


def _repeated(modules: list[Any], count: int) -> list[Any]:
    """Return a module for each of so many depths: its own, or the one that all share."""
    return modules if len(modules) == count else modules * count
