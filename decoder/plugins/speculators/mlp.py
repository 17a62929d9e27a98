"""The arithmetic of MLP speculators (Wertheimer et al., 2024, arXiv:2404.19124).

An MLP speculator is a small recurrent network over the target's last state and the tokens after it.
Each depth has an embedding, a projection, a norm and an output layer. All depths can also share
one. Parameters have the names of the published files: those of fms-extras and of vLLM's
`mlp_speculator`.

The state at position t and the token at t + 1 give the state of depth 1 and the logits of the token
at t + 2. That state and the token at t + 2 give the state of depth 2. This goes on down to the
trained depth.
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
        vocab_size: vocabulary size of the target.
        target_size: size of the target's last state.
        inner_size: size of the speculator's own states.
        num_depths: number of tokens in the longest chain that it drafts.
        tie_weights: whether all depths share one network, except for the first projection.
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
        """Numbers of the target's states that it reads: only the state after the last norm."""
        return (FINAL,)


class MlpHead(nn.Module):
    """An MLP speculator.

    Args:
        config: shape of the speculator.

    Attributes:
        config: shape of the speculator.
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
        # At the last depth, the target's state and the tokens have equal shares of the variance.
        self._state_weight = 0.5 ** (0.5 / depths)
        self._token_weight = math.sqrt((1 - self._state_weight**2) * inner / 2)

    @property
    def hidden_size(self) -> int:
        """Size of the speculator's own states."""
        return self.config.inner_size

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Return the input of depth 0, [..., target size], from the target's last states."""
        if not self.config.scale_input:
            return features
        return functional.rms_norm(features, features.shape[-1:], eps=_EPS) / _ROOT_2

    def step(self, tokens: torch.Tensor, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Return [..., hidden size], the states one token further.

        Args:
            tokens: int64[...], the tokens after the states.
            hidden: at depth 0, the result of `project`, [..., target size]; at later depths, the
                result of this method at the depth before.
            depth: number of the depth, from 0.
        """
        mixed = self.proj[depth](hidden) * self._state_weight
        mixed = mixed + self.emb[depth](tokens) * self._token_weight
        return functional.gelu(self.ln[depth](mixed))

    def logits(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Return [..., columns], the logits of the tokens after the states of a depth."""
        logits: torch.Tensor = self.head[depth](hidden)
        return logits


class ScaledShiftedNorm(nn.Module):
    """A root mean square norm with a weight and a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised input, [..., size]."""
        return functional.rms_norm(x, x.shape[-1:], self.weight, _EPS) + self.bias


def _repeated(modules: list[Any], count: int) -> list[Any]:
    """Return one module for each of `count` depths; a single module is shared by all depths."""
    return modules if len(modules) == count else modules * count
