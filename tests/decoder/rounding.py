"""By how much rounding may make two computations differ: the tolerance of all tests.

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

So values differ by SAFETY * eps * sqrt(width * operations) * scale. A rounding is anything up to
its bound, with a standard deviation of 0.29 eps, and the difference of two has 0.41: twice eps
would be five of them, where values are as large as the scale. Twice as much is for what models make
of it: attention takes the exponential of scores, so that an error of large ones is a larger one of
their weights. Norms keep errors from growing from layer to layer.

Half precisions are summed in single precision by all kernels, and rounded once for each product,
so that their width is one. What counts is the coarsest precision on the way: attention by
`softmax(dtype=float32)` makes a model of double precision one of single.

Tokens that two computations choose are the same where the best stands before the next by more than
both may be off: twice the tolerance. Greedy outputs of the tiny models keep more than that distance
in single precision, most of them ten times as much. What is drawn at random comes nearer to where
the next token begins the more is drawn: outputs that have to be the same for one seed are drawn
from models of double precision.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SAFETY: Final = 4.0
OPERATIONS_OF_A_LAYER: Final = 8
"""Two norms; queries, scores, averages of values and their output; the two products of an MLP."""
OPERATIONS_BEHIND_LAYERS: Final = 2
"""The last norm and the output layer."""
SHOWN: Final = 100.0
"""A planted error changes values by at least so many times what rounding does."""

_EPS: Final = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Rounding:
    """What rounds on the way to values.

    Attributes:
        dtype: the coarsest precision, of torch or of numpy; torch is not needed for the latter.
        width: terms of the widest sum.
        operations: products, sums and norms, one behind the other.
    """

    dtype: Any
    width: int
    operations: int

    @staticmethod
    def of(model: Any, keys: int = 0, dtype: Any = None) -> "Rounding":
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
        """Return by how much values may differ of which the largest has the size `scale`."""
        eps = _EPS[str(self.dtype).removeprefix("torch.")]
        width = self.width if eps <= _EPS["float32"] else 1
        return SAFETY * eps * math.sqrt(width * self.operations) * scale

    def apart(self, actual: Any, expected: Any, *, scale: float = 0.0) -> float:
        """Return the largest difference of two arrays, as a multiple of what rounding explains.

        Args:
            actual: numbers.
            expected: numbers, from another computation.
            scale: the largest value on the way to them, where it is larger than all of them.
        """
        found, wanted = _numbers(actual), _numbers(expected)
        if found.shape != wanted.shape:
            return math.inf
        is_other = found != wanted  # infinities may be the same
        if not is_other.any():
            return 0.0
        difference = float(np.abs(found[is_other] - wanted[is_other]).max())
        scale = max(scale, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0)))
        ratio = difference / self.tolerance(scale) if scale else math.inf
        return math.inf if math.isnan(ratio) else ratio

    def check(self, actual: Any, expected: Any, *, scale: float = 0.0) -> None:
        """Fail where two arrays differ by more than rounding explains."""
        ratio = self.apart(actual, expected, scale=scale)
        assert ratio <= 1, f"{ratio:.3g} times as far apart as rounding explains"


def _numbers(values: Any) -> NDArray[np.float64]:
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, np.float64)
