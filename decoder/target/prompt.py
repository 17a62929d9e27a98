"""What a prompt must be before it is read."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from decoder.errors import InvalidPromptError
from retriever.drafter import TokenIds


def prompt_tokens(prompt: Sequence[int] | TokenIds) -> NDArray[np.int64]:
    """Return a prompt's token ids as int64[n].

    Raises:
        InvalidPromptError: it is text, not one row, or holds other things than whole numbers.
    """
    if isinstance(prompt, str | bytes):
        raise InvalidPromptError("the prompt is text: give its token ids, as a tokenizer does")
    try:
        tokens = np.asarray(prompt)
    except (TypeError, ValueError) as error:
        raise InvalidPromptError("the prompt is not one row of token ids") from error
    if tokens.ndim != 1:
        raise InvalidPromptError(
            f"the prompt is not one row of token ids, but of shape {tokens.shape}"
        )
    if tokens.size and tokens.dtype.kind not in "iu":
        raise InvalidPromptError(f"the prompt holds {tokens.dtype} and not whole token ids")
    return tokens.astype(np.int64)


def check_prompt_length(num_tokens: int, max_length: int | None) -> None:
    """Refuse prompts that cannot be gone on from.

    Args:
        num_tokens: of the prompt.
        max_length: most tokens of a sequence, `None` where there is no limit.

    Raises:
        InvalidPromptError: it is empty, or leaves no room below the limit.
    """
    if num_tokens == 0:
        raise InvalidPromptError("the prompt is empty: give at least one token")
    if max_length is not None and num_tokens >= max_length:
        raise InvalidPromptError(
            f"the prompt has {num_tokens} tokens, and the model's limit is "
            f"{max_length} for prompt and output together: shorten it"
        )
