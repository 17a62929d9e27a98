"""How far rounding lets two computations of the same values part: the tolerance of all tests.

Where a pass has another shape, or runs on another processor, the terms of its products are added
in another order and by other instructions. The difference is bounded by rule, not by what one
machine showed:

- Each addition or product rounds by at most half of eps(dtype), relative to its result, which is
  about as large as what is summed up to at most: the largest of the values, the scale.
- Roundings have either sign. n of them add up to about sqrt(n) of one, not to n, with a chance of
  2 exp(-s**2 / 2) for more than s times as much (Higham and Mary, A new approach to probabilistic
  rounding error analysis, 2019). A value that `operations` products of `width` terms led to, one
  behind the other, has n = width * operations.
- Both computations round: twice half of eps.

So values part by SAFETY * eps * sqrt(width * operations) * scale. A rounding is anything up to its
bound, with a standard deviation of 0.29 eps, and the difference of two has 0.41: twice eps would be
five of them, where values are as large as the scale. Twice as much is for what models make of it:
attention takes the exponential of scores, so that an error of large ones is a larger one of their
weights. Norms keep errors from growing from layer to layer.

Half precisions are summed in single precision by all kernels, and rounded once for each product,
so that their width is one. What counts is the coarsest precision on the way: attention by
`softmax(dtype=float32)` makes a model of double precision one of single.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import torch

SAFETY: Final = 4.0
OPERATIONS_OF_A_LAYER: Final = 8
"""Two norms; queries, scores, averages of values and their output; the two products of an MLP."""
OPERATIONS_BEHIND_LAYERS: Final = 2
"""The last norm and the output layer."""
SHOWN: Final = 100.0
"""An error that was planted parts values by at least so many times what rounding does."""


@dataclass(frozen=True)
class Rounding:
    """What rounds on the way to values.

    Attributes:
        dtype: the coarsest precision.
        width: terms of the widest sum.
        operations: products, sums and norms, one behind the other.
    """

    dtype: torch.dtype
    width: int
    operations: int

    @staticmethod
    def of(model: Any, keys: int = 0, dtype: torch.dtype | None = None) -> "Rounding":
        """Return what rounds in a model.

        Args:
            model: of transformers.
            keys: tokens that are attended to, where they are more than a layer is wide.
            dtype: the coarsest precision, if not the model's own.
        """
        config = model.config.get_text_config()
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return Rounding(
            dtype or model.dtype,
            max(config.hidden_size, inner, keys),
            OPERATIONS_OF_A_LAYER * config.num_hidden_layers + OPERATIONS_BEHIND_LAYERS,
        )

    def tolerance(self, scale: float) -> float:
        """Return by how much values may part of which the largest has the size `scale`."""
        eps = torch.finfo(self.dtype).eps
        width = self.width if eps <= torch.finfo(torch.float32).eps else 1
        return SAFETY * eps * math.sqrt(width * self.operations) * scale

    def apart(self, actual: Any, expected: Any) -> float:
        """Return the largest difference of two arrays, as a multiple of what rounding explains."""
        found, wanted = (torch.as_tensor(each).detach().double() for each in (actual, expected))
        if found.shape != wanted.shape:
            return math.inf
        differences = (found - wanted).abs()[found != wanted]  # infinities may be the same
        if not len(differences):
            return 0.0
        scale = float(wanted[wanted.isfinite()].abs().max())
        ratio = float(differences.max()) / self.tolerance(scale) if scale else math.inf
        return math.inf if math.isnan(ratio) else ratio

    def check(self, actual: Any, expected: Any) -> None:
        """Fail where two arrays part by more than rounding explains."""
        ratio = self.apart(actual, expected)
        assert ratio <= 1, f"{ratio:.3g} times as far apart as rounding explains"
