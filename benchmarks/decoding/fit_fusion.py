"""Fit the weights that fused drafts begin with, to what came where a model was decoded.

    python -m benchmarks.decoding.fit_fusion --prompts questions.jsonl --index my.index --output F

Decodes prompts with a fused drafter and keeps, for each token that came, what every source had
said of the candidates there; then fits a logistic regression for each set of weights and prints
the log loss on a third of the prompts, which is not fitted. With `--speculator` or `--draft-model`
the sets of nodes that such a reader has read are fitted: it is asked at every step and reads as
far as it can, and where both are given, the prompts are decoded with each and with both. Sets of
which nothing was seen stay as they are. Prompts that are measured with the result must not be
among those that it was fitted to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.progress import track

from decoder.assembly import draft_limits, draft_readers
from decoder.budget.budget import FixedBudget
from decoder.commands.prompts import read_prompts
from decoder.drafters.fusion import FusedDrafter, FusedSequence
from decoder.drafters.kernels.readings import descend
from decoder.drafters.kernels.siblings import (
    ABSENT,
    BIAS,
    NUM_SETS,
    NUM_UNREAD_SETS,
    NUM_WEIGHTS,
    SLOPE,
    UNLISTED,
    add_readers,
    gather,
    set_of,
)
from decoder.drafters.options import DraftOptions
from decoder.drafters.readers import TreeReader
from decoder.drafters.recycling import NO_HINTS, RecycledLogits
from decoder.drafters.source_weights import PRIOR_ROWS, load_prior, prior_rows, save_prior
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from decoder.plugins.contenders.registry import FREE
from indexer.tokenizer import DEFAULT_MODEL
from retriever.drafter import Drafter, TokenIds
from retriever.sessions.embedded import EmbeddedDrafter

_HELD_OUT = 3
"""One prompt in so many is not fitted."""

_RIDGE = 1e-3
"""On what a set's weights have of their own, beside those that all sets of the same readers share:
sets that were hardly seen are like the others."""

_SHARED_RIDGE = 1e-5
_MAX_PROMPT_TOKENS = 600


@dataclass(frozen=True, slots=True)
class PlaceSeen:
    """One token that came, and what was said before.

    Attributes:
        chosen: the set of weights that the node is scored with.
        features: float64[C, len(PRIOR_ROWS), NUM_WEIGHTS], what each weight is multiplied by.
        came: bool[C], which candidate it was, if any.
        is_fitted: whether it is not held out.
    """

    chosen: int
    features: NDArray[np.float64]
    came: NDArray[np.bool_]
    is_fitted: bool = True


class RecordingDrafter(FusedDrafter):
    """A fused drafter of one tree that keeps what its sources said instead of learning from it.

    Attributes:
        seen: what was said.
        is_fitting: whether what comes now is for fitting.
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.seen: list[PlaceSeen] = []
        self.is_fitting = True
        self._prior_rows = prior_rows(1, self._readers.kinds)

    def _learn_weights(self, sequence: FusedSequence, came: TokenIds) -> None:
        self._plant(sequence.trees)
        trees = np.arange(len(sequence.trees), dtype=np.int32)
        places = np.concatenate([trees, sequence.read.root_rows()])
        context, hints, readings = sequence.context(), sequence.hints, sequence.read.readings
        told, table = self._siblings, self._table
        for token in came.tolist():
            of_trees, rows = places[: len(trees)], places[len(trees) :]
            count = gather(told, self._forest, of_trees, table, context, hints, 0)
            count = add_readers(told, count, readings, rows)
            self.seen.append(self._seen(count, set_of(told.known, readings.labels), token))
            below = np.empty_like(places)
            descend(self._forest, readings, places, below, token)
            places, hints = below, NO_HINTS
            context = np.append(np.int32(token), context[:-1]).astype(np.int32)

    def _seen(self, count: int, chosen: int, token: int) -> PlaceSeen:
        told = self._siblings
        listed = told.log_odds[:count] != ABSENT
        features = np.zeros((count, len(PRIOR_ROWS), NUM_WEIGHTS))
        of_sources = self._prior_rows[:-1]
        features[:, of_sources, BIAS] = told.known & listed
        features[:, of_sources, SLOPE] = np.where(told.known & listed, told.log_odds[:count], 0.0)
        features[:, of_sources, UNLISTED] = told.known & ~listed
        features[:, self._prior_rows[-1], BIAS] = 1.0
        return PlaceSeen(chosen, features, told.tokens[:count] == token, self.is_fitting)


class Places:
    """What was seen, as tensors: a row for each candidate."""

    def __init__(self, seen: list[PlaceSeen]) -> None:
        numbers = np.repeat(np.arange(len(seen)), [len(place.came) for place in seen])
        self.sets = torch.tensor(np.array([place.chosen for place in seen])[numbers])
        self.inputs = torch.tensor(
            np.concatenate([place.features for place in seen]), dtype=torch.float32
        )
        self.came = torch.tensor(
            np.concatenate([place.came for place in seen]), dtype=torch.float32
        )
        self.num_places = len(seen)

    def nats(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the log loss of a place with weights [NUM_SETS, rows, NUM_WEIGHTS]."""
        scores = (self.inputs * weights[self.sets]).sum(dim=(1, 2))
        summed = torch.nn.functional.binary_cross_entropy_with_logits(
            scores, self.came, reduction="sum"
        )
        return torch.div(summed, max(self.num_places, 1))


def fit(seen: list[PlaceSeen]) -> NDArray[np.float64]:
    """Return float64[NUM_SETS, len(PRIOR_ROWS), NUM_WEIGHTS], those of sets not seen as shipped."""
    places = Places([place for place in seen if place.is_fitted])
    shape = (NUM_SETS, *places.inputs.shape[1:])
    own = torch.zeros(shape, requires_grad=True)
    shared = torch.zeros((NUM_SETS // NUM_UNREAD_SETS, 1, *shape[1:]), requires_grad=True)
    optimizer = torch.optim.LBFGS([own, shared], max_iter=150, line_search_fn="strong_wolfe")

    def weights() -> torch.Tensor:
        alike = shared.expand(-1, NUM_UNREAD_SETS, *shape[1:]).reshape(shape)
        return own + alike

    def closure() -> Any:
        optimizer.zero_grad()
        ridge = _RIDGE * own.square().sum() + _SHARED_RIDGE * shared.square().sum()
        regularized = places.nats(weights()) + ridge
        regularized.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return regularized

    optimizer.step(closure)  # type: ignore[no-untyped-call]  # nor this
    fitted = load_prior()
    kinds = set((places.sets // NUM_UNREAD_SETS).tolist())
    for first in sorted(kinds - {0} or kinds):  # where readers are, nodes unread are the odd ones
        sets = slice(first * NUM_UNREAD_SETS, (first + 1) * NUM_UNREAD_SETS)
        fitted[sets] = weights()[sets].detach().double().numpy()
    return fitted


def record(
    language_model: LanguageModel,
    drafter: Drafter,
    readers: Sequence[TreeReader],
    texts: list[str],
    max_new_tokens: int,
) -> list[PlaceSeen]:
    """Decode prompts and return what was said wherever a token came."""
    limits = draft_limits(language_model)
    recording = RecordingDrafter(
        [drafter], limits, readers=readers, recycled=RecycledLogits(), costs=FREE
    )
    target = Target(language_model.model, states=recording.states)
    decoder = Decoder(target, recording, FixedBudget(24), stop_ids=language_model.stop_ids)
    names = ", ".join(reader.name for reader in readers) or "no reader"
    for number, text in enumerate(track(texts, description=f"decoding with {names}")):
        recording.is_fitting = number % _HELD_OUT != _HELD_OUT - 1
        prompt = language_model.encode(text)[:_MAX_PROMPT_TOKENS]
        for _ in decoder.generate(prompt, max_new_tokens):
            pass
    return recording.seen


def report(seen: list[PlaceSeen], fitted: NDArray[np.float64]) -> None:
    """Print the log loss where it was not fitted, as shipped and as fitted, by what was read."""
    held_out = [place for place in seen if not place.is_fitted]
    for knowing in sorted({place.chosen // NUM_UNREAD_SETS for place in held_out}):
        places = Places([p for p in held_out if p.chosen // NUM_UNREAD_SETS == knowing])
        before, after = (
            float(places.nats(torch.tensor(weights, dtype=torch.float32)))
            for weights in (load_prior(), fitted)
        )
        readers = [name for bit, name in ((1, "speculator"), (2, "draft model")) if knowing & bit]
        read_by = " and ".join(readers) or "no reader"
        print(
            f"{places.num_places} places held out, read by {read_by}: "
            f"{before:.3f} nats a place as shipped, {after:.3f} as fitted"
        )


def main(  # noqa: PLR0913, PLR0917  as many as a command has
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    output: Annotated[Path, typer.Option(help="Where the fitted weights go (.npz).")],
    index: Annotated[list[Path] | None, typer.Option(help="Index to draft from.")] = None,
    model: Annotated[str, typer.Option(help="The model.")] = DEFAULT_MODEL,
    skip: Annotated[int, typer.Option(help="Prompts to leave out, which will be measured.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Most prompts behind those.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens for each.")] = 96,
    dtype: Annotated[Precision, typer.Option(help="What to compute in.")] = Precision.BFLOAT16,
    speculator: Annotated[Path | None, typer.Option(help="A head of the model.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="A smaller model.")] = None,
) -> None:
    """Fit the weights that fused drafts begin with."""
    language_model = load_model(ModelOptions(model, precision=dtype))
    texts = [prompt.text for prompt in read_prompts(prompts)[skip:]][:limit]
    named = {"speculator": speculator, "draft_model": draft_model}
    given = {name: value for name, value in named.items() if value is not None}
    readers = draft_readers(
        DraftOptions.model_validate({"index": index or [], **given}), language_model
    )
    seen: list[PlaceSeen] = []
    for count in range(min(len(readers), 1), len(readers) + 1):
        for asked in combinations(readers, count):
            drafter = EmbeddedDrafter.open_indexes(
                index or [], vocabulary=language_model.vocabulary
            )
            try:
                seen += record(language_model, drafter, asked, texts, max_new_tokens)
            finally:
                drafter.shut_down()
    fitted = fit(seen)
    with output.open("wb") as stream:
        save_prior(stream, fitted)
    listed = np.mean([place.came.any() for place in seen])
    print(f"{len(seen)} places, {listed:.1%} among the candidates")
    report(seen, fitted)


if __name__ == "__main__":
    typer.run(main)
