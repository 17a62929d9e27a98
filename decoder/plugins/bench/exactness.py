"""A check of exactness: where outputs of shared passes differ from outputs of single prompts."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from decoder.commands.plain_comparison import first_difference
from decoder.model.pretrained import LanguageModel
from decoder.plugins.contenders.contender import THEIRS
from decoder.plugins.contenders.standings import Comparison

TIE: Final = 1e-4
"""Logits closer than this may swap order in float32, because the rounding depends on the width of
the pass."""


ONE_BY_ONE: Final = "model.generate, one prompt at a time"
"""The reference for outputs that should be the same."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two outputs differ.

    Attributes:
        position: position of the first differing token among the generated ones, from 0.
        plain: token of `model.generate` at that position; `None` if its output had ended.
        drafted: the decoder's token at that position; `None` if its output had ended.
        best_tokens: the two most probable tokens at that position.
        gap: difference between the logits of these two tokens, in float64.
    """

    position: int
    plain: int | None
    drafted: int | None
    best_tokens: tuple[int, int]
    gap: float

    @property
    def is_tie(self) -> bool:
        """Whether the gap is within float32 rounding, so that neither output is wrong."""
        return self.gap < TIE

    def as_json(self) -> dict[str, Any]:
        """Return the difference as plain values."""
        return {**asdict(self), "is_tie": self.is_tie}


@dataclass(frozen=True, slots=True)
class Outputs:
    """Two outputs of a prompt.

    Attributes:
        prompt: tokens of the prompt.
        plain: output of `model.generate`.
        drafted: output of a decoder.
    """

    prompt: list[int]
    plain: list[int]
    drafted: list[int]


def differences(language_model: LanguageModel, pairs: Iterable[Outputs]) -> list[Difference | None]:
    """Return where the outputs of each pair differ; `None` if they are the same.

    Logits are computed by a float64 copy of the model, which is made at the first difference.
    Converting the model itself and back would move weights that captured graphs read.
    """
    model: Any = None
    found: list[Difference | None] = []
    for pair in pairs:
        place = first_difference(pair.plain, pair.drafted)
        if place is None:
            found.append(None)
            continue
        if model is None:
            model = copy.deepcopy(language_model.model).to(torch.float64)  # type: ignore[arg-type]  # wrapped without its types
        position = place - 1
        tokens, gap = _best_two(model, [*pair.prompt, *pair.plain[:position]])
        plain, drafted = (
            output[position] if position < len(output) else None
            for output in (pair.plain, pair.drafted)
        )
        found.append(Difference(position, plain, drafted, tokens, gap))
    return found


def exactness(
    language_model: LanguageModel,
    decoded: Iterable[tuple[int, Comparison]],
    plain: Mapping[tuple[int, ...], list[int]],
) -> dict[str, Any] | None:
    """Return where greedy outputs differ from the outputs of single prompts, and by how much.

    Args:
        language_model: the model of the outputs.
        decoded: groups of prompts with the runs of all contenders, and the number of prompts at a
            time.
        plain: outputs of `model.generate` for single prompts, by the prompts' tokens; other prompts
            are not compared.

    Returns:
        JSON values; `None` if nothing is compared.
    """
    if not plain:
        return None
    seen: dict[tuple[int, int, str, tuple[int, ...]], Outputs] = {}
    num_answers = 0
    for width, each in decoded:
        for name, run in each.runs.items():
            for at, (prompt, output) in enumerate(zip(each.asked, run.outputs, strict=True)):
                expected = plain.get(tuple(prompt))
                num_answers += expected is not None
                if expected is not None and output != expected:
                    number = each.group * len(each.asked) + at
                    seen[number, width, name, tuple(output)] = Outputs(prompt, expected, output)
    parted = differences(language_model, seen.values())
    return {
        "compared_with": ONE_BY_ONE,
        "num_answers": num_answers,
        "num_prompts": len(plain),
        "different": [
            {"prompt": number, "parallel": width, "contender": name, **found.as_json()}
            for (number, width, name, _), found in zip(seen, parted, strict=True)
            if found is not None
        ],
    }


def wrong_outputs(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return our own outputs in a report that differ without a tie, so they are wrong."""
    different = (report["exactness"] or {"different": []})["different"]
    return [each for each in different if not each["is_tie"] and each["contender"] not in THEIRS]


@torch.inference_mode()
def _best_two(model: Any, tokens: list[int]) -> tuple[tuple[int, int], float]:
    """Return the two most probable next tokens and the difference between their logits."""
    logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0, -1]
    values, indices = logits.topk(2)
    first, second = indices.tolist()
    return (first, second), float(values[0] - values[1])
