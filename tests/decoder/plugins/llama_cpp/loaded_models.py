"""Models loaded into the real engine, and what they generate."""

from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from tests.decoder.plugins.llama_cpp import tiny_model
from tests.decoder.rounding import OPERATIONS_BEHIND_LAYERS, OPERATIONS_OF_A_LAYER, Rounding

NUM_TOKENS = 80
ROUNDING = Rounding(
    np.dtype(np.float32),
    tiny_model.WIDEST,
    OPERATIONS_OF_A_LAYER * tiny_model.LAYERS + OPERATIONS_BEHIND_LAYERS,
)
LOGITS = 8.0
"""About the largest: logarithms of probabilities may be smaller than what they are made of."""


def load(path: Path, **options: Any) -> Any:
    """In float32 on one thread: nothing is rounded by the width of a pass."""
    exact = {"type_k": 0, "type_v": 0, "n_threads": 1, "n_threads_batch": 1}
    return llama_cpp.Llama(str(path), **{"n_ctx": 512, "verbose": False, **exact, **options})


def generated(llm: Any, prompt: list[int], number: int = NUM_TOKENS, **options: Any) -> list[int]:
    return list(islice(llm.generate(prompt, **{"temp": 0.0, **options}), number))


def from_nothing(
    llm: Any, prompt: list[int], number: int = NUM_TOKENS, **options: Any
) -> list[int]:
    llm.reset()
    llm.set_seed(7)
    return generated(llm, prompt, number, **options)
