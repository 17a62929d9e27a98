"""Fit the weights that fused drafts begin with, to what came where a model was decoded.

    python -m benchmarks.decoding.fit_fusion --prompts questions.jsonl --index my.index --output F

Decodes prompts with a fused drafter and keeps, for each token that came, what every source had
said of the candidates there; then fits a logistic regression for each set of weights and prints
the log loss on the last third, which is not fitted. Prompts that are measured with the result
must not be among those that it was fitted to.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.progress import track

from decoder.assembly import draft_limits
from decoder.budget.budget import FixedBudget
from decoder.commands.prompts import read_prompts
from decoder.drafters.fusion import FusedDrafter, FusedSequence
from decoder.drafters.kernels.forest import step_down
from decoder.drafters.kernels.siblings import (
    ABSENT,
    BIAS,
    NUM_SETS,
    NUM_WEIGHTS,
    SLOPE,
    UNLISTED,
    Hints,
    gather,
    set_of,
)
from decoder.drafters.recycling import NO_HINTS, RecycledLogits
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from indexer.tokenizer import DEFAULT_MODEL
from retriever.drafter import Drafter, TokenIds
from retriever.sessions.embedded import EmbeddedDrafter

_FITTED_SHARE = 2 / 3
_RIDGE = 1e-3
_MAX_PROMPT_TOKENS = 600


@dataclass(frozen=True, slots=True)
class PlaceSeen:
    """One token that came, and what was said before.

    Attributes:
        chosen: the set of weights that the node is scored with.
        features: float64[C, S + 1, NUM_WEIGHTS], what each weight is multiplied by.
        came: bool[C], which candidate it was, if any.
    """

    chosen: int
    features: NDArray[np.float64]
    came: NDArray[np.bool_]


class RecordingDrafter(FusedDrafter):
    """A fused drafter that keeps what its sources said instead of learning from it."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.seen: list[PlaceSeen] = []

    def _learn_weights(self, sequence: FusedSequence, came: TokenIds) -> None:
        if not sequence.has_drafted:
            return
        self._plant(sequence.trees)
        places = np.arange(len(sequence.trees), dtype=np.int32)
        context, hints = sequence.context(), sequence.hints
        for token in came.tolist():
            self.seen.append(self._seen(places, context, hints, token))
            below = np.empty_like(places)
            step_down(self._forest, places, below, token)
            places, hints = below, NO_HINTS
            context = np.append(np.int32(token), context[:-1]).astype(np.int32)

    def _seen(self, places: TokenIds, context: TokenIds, hints: Hints, token: int) -> PlaceSeen:
        told = self._siblings
        count = gather(told, self._forest, places, self._table(), context, hints, 0)
        listed = told.log_odds[:count] != ABSENT
        features = np.zeros((count, len(told.known) + 1, NUM_WEIGHTS))
        features[:, :-1, BIAS] = told.known & listed
        features[:, :-1, SLOPE] = np.where(told.known & listed, told.log_odds[:count], 0.0)
        features[:, :-1, UNLISTED] = told.known & ~listed
        features[:, -1, BIAS] = 1.0
        return PlaceSeen(set_of(told.known, len(places)), features, told.tokens[:count] == token)


def fit(seen: list[PlaceSeen]) -> tuple[NDArray[np.float64], float]:
    """Return float64[NUM_SETS, S + 1, NUM_WEIGHTS], and nats a place where it was not fitted."""
    sets = torch.tensor([place.chosen for place in seen for _ in place.came])
    inputs = torch.tensor(np.concatenate([place.features for place in seen]), dtype=torch.float32)
    came = torch.tensor(np.concatenate([place.came for place in seen]), dtype=torch.float32)
    places = torch.tensor([number for number, place in enumerate(seen) for _ in place.came])
    fitted = places < len(seen) * _FITTED_SHARE
    weights = torch.zeros((NUM_SETS, *inputs.shape[1:]), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss(chosen: torch.Tensor) -> torch.Tensor:
        scores = (inputs[chosen] * weights[sets[chosen]]).sum(dim=(1, 2))
        summed = torch.nn.functional.binary_cross_entropy_with_logits(
            scores, came[chosen], reduction="sum"
        )
        return torch.div(summed, len(set(places[chosen].tolist())))

    def closure() -> Any:
        optimizer.zero_grad()
        regularized = loss(fitted) + _RIDGE * weights.square().sum()
        regularized.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return regularized

    optimizer.step(closure)  # type: ignore[no-untyped-call]  # nor this
    with torch.no_grad():
        return weights.double().numpy(), float(loss(~fitted))


def record(
    language_model: LanguageModel, drafter: Drafter, texts: list[str], max_new_tokens: int
) -> list[PlaceSeen]:
    """Decode prompts and return what was said wherever a token came."""
    limits = draft_limits(language_model)
    recording = RecordingDrafter([drafter], limits, recycled=RecycledLogits())
    target = Target(language_model.model)
    decoder = Decoder(target, recording, FixedBudget(24), stop_ids=language_model.stop_ids)
    for text in track(texts, description="decoding"):
        prompt = language_model.encode(text)[:_MAX_PROMPT_TOKENS]
        for _ in decoder.generate(prompt, max_new_tokens):
            pass
    return recording.seen


def main(  # noqa: PLR0913, PLR0917  as many as a command has
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    output: Annotated[Path, typer.Option(help="Where the fitted weights go (.npy).")],
    index: Annotated[list[Path] | None, typer.Option(help="Index to draft from.")] = None,
    model: Annotated[str, typer.Option(help="The model.")] = DEFAULT_MODEL,
    skip: Annotated[int, typer.Option(help="Prompts to leave out, which will be measured.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Most prompts behind those.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens for each.")] = 96,
    dtype: Annotated[Precision, typer.Option(help="What to compute in.")] = Precision.BFLOAT16,
) -> None:
    """Fit the weights that fused drafts begin with."""
    language_model = load_model(ModelOptions(model, precision=dtype))
    texts = [prompt.text for prompt in read_prompts(prompts)[skip:]][:limit]
    drafter = EmbeddedDrafter.open_indexes(index or [], vocabulary=language_model.vocabulary)
    try:
        seen = record(language_model, drafter, texts, max_new_tokens)
    finally:
        drafter.shut_down()
    weights, nats = fit(seen)
    np.save(output, weights)
    listed = np.mean([place.came.any() for place in seen])
    print(f"{len(seen)} places, {listed:.1%} among the candidates; {nats:.3f} nats a place")


if __name__ == "__main__":
    typer.run(main)
