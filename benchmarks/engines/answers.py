"""Answers to warm with, which an engine may give once and keep for other runs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from decoder.prompts import Prompt


def kept_answers(
    path: Path | None, prompts: Sequence[Prompt], answer: Callable[[str], list[int]]
) -> list[list[int]]:
    """Return the token ids that an engine answers prompts with.

    Args:
        path: a file of JSON where answers are kept, each as soon as it is there; `None` for none.
        prompts: what is answered.
        answer: gives the new tokens for a prompt's text, where the file has none.
    """
    is_kept = path is not None and path.exists()
    kept: dict[str, list[int]] = json.loads(path.read_text("utf-8")) if is_kept and path else {}
    for prompt in prompts:
        if prompt.text not in kept:
            kept[prompt.text] = answer(prompt.text)
            if path is not None:
                path.write_text(json.dumps(kept), encoding="utf-8")
    return [kept[prompt.text] for prompt in prompts]
