"""Make a small draft model of a target: two of its layers, taught by what was recorded for a head.

    python -m benchmarks.decoding.small_draft_model --recorded my-head.training --output small

Draft models are measured with a model of the target's own tokenizer, and few targets have a smaller
sister. This one has the target's embedding, its first and its last layer and its final norm, and
learns to give the target's own distributions (distillation, as in DistillSpec, arXiv:2310.08461) on
the texts that `foredraft train` has recorded. The embedding stays the target's: it is most of the
model's weights, and so the tokens that are seldom taught keep their places. Of the output layer
each step takes the most frequent tokens and some others at random, so that all are learned.

It prints how often a token of held-out outputs is the model's first guess, or among its first 4 or
8, before and after. Then: `foredraft bench --contender model --draft-model small`.
"""

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from safetensors import safe_open
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.plugins.training.head_trainer import (
    BATCH_TOKENS,
    LessonBatch,
    Teaching,
    batch_of,
    batches_of,
    soft_cross_entropy,
)
from decoder.plugins.training.taught_store import TaughtStore
from indexer.tokenizer import DEFAULT_MODEL

RANKS: Final = (1, 4, 8)

_RATE: Final = 1e-3
_WARM_UP: Final = 30
_LARGEST_GRADIENT: Final = 1.0
_TOLD_EVERY_S: Final = 30.0
_JUDGED_ROWS: Final = 512
"""Rows whose logits are computed at once: 100 MB for a vocabulary of 49,152 tokens."""


def small_model(target: PreTrainedModel) -> Any:
    """Return a model in float32 of a target's first and last layer, its embedding and its norm."""
    config = copy.deepcopy(target.config)
    last = config.num_hidden_layers - 1
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[0], config.layer_types[last]]
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # the library gives no types
    kept = {0: 0, last: 1}
    weights = {}
    for name, value in target.state_dict().items():
        before, found, behind = name.partition("layers.")
        number, _, rest = behind.partition(".")
        if not found:
            weights[name] = value
        elif int(number) in kept:
            weights[f"{before}layers.{kept[int(number)]}.{rest}"] = value
    model.load_state_dict(weights)
    for each in (model.get_input_embeddings(), _output_of(model)):
        each.requires_grad_(requires_grad=False)
    return model.to(torch.device(target.device))


def teach(  # noqa: PLR0913  the last four are options
    model: PreTrainedModel,
    language_model: LanguageModel,
    store: TaughtStore,
    seconds: float,
    *,
    num_frequent: int = 8192,
    num_others: int = 2048,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Train a model to give a target's distributions, and return the number of steps.

    Args:
        model: see `small_model`; changed.
        language_model: the target.
        store: recorded texts with the state that its last layer gave.
        seconds: how long.
        num_frequent: tokens that every step compares, those written most often.
        num_others: tokens that a step compares besides, drawn for it.
        seed: of the order of texts and of the drawn tokens.
        clock: tells the time in seconds.
    """
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    random = np.random.default_rng(seed)
    by_count = np.argsort(-store.token_counts(_num_tokens(model)), kind="stable")
    frequent, others = by_count[:num_frequent], by_count[num_frequent:]
    model.train()
    start = told = clock()
    for step, batch in enumerate(_batches(store, language_model.model, random)):
        now = clock()
        over = (now - start) / seconds
        if over >= 1:
            return step
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, over)
        drawn = random.choice(others, min(num_others, len(others)), replace=False)
        compared = torch.from_numpy(np.concatenate([frequent, drawn]))
        loss = _loss(model, Teaching.of(language_model, compared), batch, compared)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(weights, _LARGEST_GRADIENT)
        optimizer.step()
        if now - told > _TOLD_EVERY_S:
            told = now
            typer.echo(f"{over:.0%}: {step + 1} steps, loss {float(loss.detach()):.3f}", err=True)
    return 0


@torch.no_grad()
def foretold(model: Any, store: TaughtStore) -> NDArray[np.float64]:
    """Return float64[ranks], how often the token that came is among a model's first guesses."""
    model.eval()
    hits, places = torch.zeros(len(RANKS)), 0
    for batch in _once(store, model, np.random.default_rng(0)):
        rows = batch.counts.nonzero(as_tuple=True)
        came = batch.tokens[rows[0], rows[1] + 1]
        states = _states(model, batch)[rows]
        for start in range(0, len(came), _JUDGED_ROWS):
            part = slice(start, start + _JUDGED_ROWS)
            logits = functional.linear(states[part], _output_of(model).weight.to(states.dtype))
            best = logits.topk(min(RANKS[-1], logits.shape[-1])).indices
            is_right = (best == came[part, None]).cpu()
            hits += torch.tensor([float(is_right[:, :rank].any(-1).sum()) for rank in RANKS])
        places += len(came)
    shares: NDArray[np.float64] = (hits / max(places, 1)).double().numpy()
    return shares


def opened(directory: Path) -> TaughtStore:
    """Open what was recorded in a directory, whatever it is of."""
    first = directory / "taught-00000.safetensors"
    if not first.is_file():
        raise typer.BadParameter(f"{directory} holds no recorded texts")
    with safe_open(first, framework="pt") as file:
        return TaughtStore(directory, json.loads(file.metadata()["of"]))


def _loss(
    model: PreTrainedModel, teaching: Teaching, batch: LessonBatch, compared: torch.Tensor
) -> torch.Tensor:
    """Return float32[], the mean cross-entropy at tokens of outputs, over some of all tokens."""
    with torch.autocast(batch.tokens.device.type, torch.bfloat16):
        wanted = teaching.logits(batch.last[batch.counts]).softmax(-1, dtype=torch.float32)
        rows = _output_of(model).weight[compared.to(batch.tokens.device)]
        said = functional.linear(_states(model, batch)[batch.counts], rows)
        return soft_cross_entropy(said, wanted)


def _states(model: PreTrainedModel, batch: LessonBatch) -> torch.Tensor:
    """Return [batch, rows, d], what the output layer is given; padding stands behind all texts."""
    with torch.autocast(batch.tokens.device.type, torch.bfloat16):
        output = model.base_model(input_ids=batch.tokens[:, :-1], use_cache=False)
    states: torch.Tensor = output.last_hidden_state
    return states


def _batches(
    store: TaughtStore, model: PreTrainedModel, random: np.random.Generator
) -> Iterator[LessonBatch]:
    while True:
        yield from _once(store, model, random)


def _once(
    store: TaughtStore, model: PreTrainedModel, random: np.random.Generator
) -> Iterator[LessonBatch]:
    """Yield all texts in batches; of their states those that the last layer gave alone."""
    order = random.permutation(len(store))
    for numbers in batches_of(order, store.lengths(), BATCH_TOKENS, random):
        examples = [store[number] for number in numbers]
        size = int(model.config.hidden_size)
        width = examples[0].states.shape[1] - size
        batch = batch_of(examples, width, size, torch.device(model.device))
        if batch.counts.any():
            yield batch


def _output_of(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]  # not typed there


def _num_tokens(model: PreTrainedModel) -> int:
    return int(_output_of(model).weight.shape[0])


def _rate(step: int, over: float) -> float:
    """Return the rate of a step: it rises for a few steps and then falls as a cosine."""
    return _RATE * min(1.0, (step + 1) / _WARM_UP) * (1 + math.cos(math.pi * over)) / 2


def main(  # noqa: PLR0913, PLR0917  as many as a command has
    recorded: Annotated[Path, typer.Option(help="HEAD.training, as `foredraft train` left it.")],
    output: Annotated[Path, typer.Option(help="Folder for the draft model.")],
    model: Annotated[str, typer.Option(help="The target.")] = DEFAULT_MODEL,
    minutes: Annotated[float, typer.Option(help="How long to train.")] = 10.0,
    draft_vocabulary: Annotated[int, typer.Option(help="Tokens that every step compares.")] = 8192,
    seed: Annotated[int, typer.Option(help="Of the order of texts.")] = 0,
) -> None:
    """Make a small draft model of a target."""
    language_model = load_model(ModelOptions(model, precision=Precision.BFLOAT16))
    store, judging = opened(recorded / "taught"), opened(recorded / "judging")
    small = small_model(language_model.model)
    num_weights = sum(each.numel() for each in small.parameters())
    typer.echo(f"{num_weights / 1e6:.1f} million weights, {store.num_tokens:,} taught tokens")
    _print("before", foretold(small, judging))
    steps = teach(
        small, language_model, store, minutes * 60, num_frequent=draft_vocabulary, seed=seed
    )
    _print(f"after {steps} steps", foretold(small, judging))
    small.to(torch.bfloat16).save_pretrained(output)
    language_model.tokenizer.save_pretrained(output)
    typer.echo(f"draft with it: foredraft bench --draft-model {output}")


def _print(when: str, shares: NDArray[np.float64]) -> None:
    parts = (f"top {rank} {share:.3f}" for rank, share in zip(RANKS, shares, strict=True))
    typer.echo(f"{when}: held-out tokens foretold: {', '.join(parts)}")


if __name__ == "__main__":
    typer.run(main)
