"""What each pass of a reader adds to fused drafts, and what that is worth where passes cost.

    python -m benchmarks.decoding.reader_gains --prompts questions.jsonl --index my.index \
        --speculator HEAD --nodes 5 --output FILE

Decodes prompts with a reader that is asked at every step and reads as far as it can, and keeps of
every draft how many tokens were accepted of the tree without it, after its first pass and after
each further one. From that follows for any cost of a pass what decoding gains: if the reader is
never asked, always for one pass, always for all, by the shipped rule, and by the best threshold
that could have been known. So one run on a small model projects a larger one, whose passes of head
and target are measured elsewhere: `--cost 0.05` is a pass of the reader that takes a twentieth of
the target's, with all that it takes besides.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from decoder.assembly import DrafterSettings, draft_limits
from decoder.budget.budget import FixedBudget
from decoder.commands.bench import circumstances
from decoder.commands.prompts import read_prompts
from decoder.contenders.registry import FREE
from decoder.drafters.asking import AskedDraft, GainEstimate
from decoder.drafters.following import Verified
from decoder.drafters.fusion import MAX_PASSES, FusedDrafter, FusedSequence
from decoder.drafters.reading import TreeReader
from decoder.drafters.recycling import RecycledLogits
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from indexer.tokenizer import DEFAULT_MODEL
from retriever.drafter import Drafter, TokenIds
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree

_LEVELS: Final = 8
_ALL: Final = MAX_PASSES + 1
_THRESHOLDS: Final = np.linspace(0, 1.01, 102)


@dataclass(frozen=True, slots=True)
class Gained:
    """What came of one draft.

    Attributes:
        sureness: of the tree without the reader.
        expected: tokens of that tree that were expected to be accepted, and after each pass.
        accepted: tokens of that tree that were, and after each pass.
    """

    sureness: float
    expected: list[float]
    accepted: list[int]


class WatchedFusion(FusedDrafter):
    """A fused drafter that keeps its tree after each pass of its reader.

    Attributes:
        gained: what came of each draft.
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.gained: list[Gained] = []
        self._trees: list[DraftTree] = []

    def _read(
        self, sequence: FusedSequence, asked: AskedDraft, budget_nodes: int, floor: float
    ) -> DraftTree:
        self._trees = [asked.tree.prefix(budget_nodes)]
        self._budget_nodes = budget_nodes
        tree = super()._read(sequence, asked, budget_nodes, floor)
        self._trees.append(tree)
        return tree

    def _unread(self, read: Any, asked: AskedDraft, size: int) -> NDArray[np.intp]:
        """Keep the tree before each further pass, too."""
        self._trees.append(self._tree(min(size, self._budget_nodes)))
        return super()._unread(read, asked, size)

    def _learn_gains(self, sequence: FusedSequence, verified: Verified, came: TokenIds) -> None:
        super()._learn_gains(sequence, verified, came)
        if not sequence.asked:
            return
        trees = self._trees[: 1 + sequence.asked[0].num_passes]
        self.gained.append(
            Gained(
                sequence.asked[0].sureness,
                [float(tree.probabilities.sum()) for tree in trees],
                [len(tree.follow(came)) for tree in trees],
            )
        )


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is decoded: prompts to warm with, and those of which drafts are kept."""

    warm: list[list[int]]
    measured: list[list[int]]


def watched(
    language_model: LanguageModel, drafters: Sequence[Drafter], reader: TreeReader
) -> WatchedFusion:
    """Return a drafter whose reader is asked at every step and reads as far as it can."""
    limits, recycled = draft_limits(language_model), RecycledLogits()
    return WatchedFusion(drafters, limits, readers=[reader], recycled=recycled, costs=FREE)


def watch(
    language_model: LanguageModel,
    fused: WatchedFusion,
    prompts: Prompts,
    nodes: int,
    max_new_tokens: int,
) -> list[Gained]:
    """Decode prompts; return what came of the drafts for those that are measured."""
    target = Target(language_model.model, states=fused.states)
    decoder = Decoder(target, fused, FixedBudget(nodes), stop_ids=language_model.stop_ids)
    for prompt in prompts.warm:
        list(decoder.generate(prompt, max_new_tokens))
    fused.gained.clear()
    for number, prompt in enumerate(prompts.measured, start=1):
        list(decoder.generate(prompt, max_new_tokens))
        typer.echo(f"{number} of {len(prompts.measured)} prompts", err=True)
    return fused.gained


def accepted_after(gained: Sequence[Gained], num_passes: int) -> NDArray[np.float64]:
    """Return float64[drafts], accepted tokens after so many passes, or all that there were."""
    return np.array([each.accepted[: 1 + num_passes][-1] for each in gained], np.float64)


def by_sureness(gained: Sequence[Gained]) -> list[dict[str, float]]:
    """Return what passes add where the tree without the reader is that sure."""
    sureness = np.array([each.sureness for each in gained])
    before, first, last = (accepted_after(gained, passes) for passes in (0, 1, _ALL))
    levels = []
    edges = np.quantile(sureness, np.linspace(0, 1, _LEVELS + 1))
    for low, high in pairwise(edges):
        chosen = (sureness >= low) & (sureness <= high)
        if not chosen.any():
            continue
        levels.append(
            {
                "from": float(low),
                "to": float(high),
                "before": float(before[chosen].mean()),
                "first_pass": float((first - before)[chosen].mean()),
                "further_passes": float((last - first)[chosen].mean()),
            }
        )
    return levels


def worth(gained: Sequence[Gained], cost: float) -> dict[str, float]:
    """Return how many times as fast decoding is as without the reader, by how it is asked.

    Args:
        gained: of drafts at which it was always asked.
        cost: of its pass, in passes of the target.
    """
    before, first, last = (accepted_after(gained, passes) for passes in (0, 1, _ALL))
    passes = np.mean([len(each.accepted) - 1 for each in gained])
    sureness = np.array([each.sureness for each in gained])
    plain = 1 + before.mean()
    by_threshold = [
        _speed(np.where(sureness < least, first, before), plain, cost * (sureness < least).mean())
        for least in _THRESHOLDS
    ]
    asked = by_rule(gained, cost)
    return {
        "one_pass_always": _speed(first, plain, cost),
        "all_passes_always": _speed(last, plain, cost * float(passes)),
        "by_rule": _speed(np.where(asked, first, before), plain, cost * asked.mean()),
        "by_rule_asked": float(asked.mean()),
        "by_best_threshold": max(by_threshold),
    }


def _speed(accepted: NDArray[np.float64], plain: float, extra: float) -> float:
    """Return tokens for each pass of the target, over those without the reader."""
    return float((1 + accepted.mean()) / plain / (1 + extra))


def by_rule(gained: Sequence[Gained], cost: float) -> NDArray[np.bool_]:
    """Return bool[drafts], where the shipped rule asks for a first pass of that cost."""
    estimate, asked = GainEstimate(), np.zeros(len(gained), np.bool_)
    tokens = steps = 0.0
    for number, each in enumerate(gained):
        token_s = steps / tokens if tokens else 0.0
        asked[number] = estimate.pays(each.sureness, token_s)
        before, first = each.accepted[:2]
        if asked[number]:
            estimate.learn(each.sureness, first - before, cost)
        tokens += 1 + (first if asked[number] else before)
        steps += 1 + cost * asked[number]
    return asked


def summary(gained: Sequence[Gained], costs: Sequence[float]) -> dict[str, Any]:
    """Return all figures as plain values."""
    most = max(len(each.accepted) for each in gained)
    expected = [each.expected[0] for each in gained], [each.expected[-1] for each in gained]
    return {
        "drafts": len(gained),
        "tokens_a_pass": [1 + float(accepted_after(gained, n).mean()) for n in range(most)],
        "passes_a_draft": float(np.mean([len(each.accepted) - 1 for each in gained])),
        "expected_before_and_after": [float(np.mean(each)) for each in expected],
        "by_sureness": by_sureness(gained),
        "worth": {f"{cost:g}": worth(gained, cost) for cost in costs},
    }


def main(  # noqa: PLR0913, PLR0917  as many as a command has
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    output: Annotated[Path, typer.Option(help="JSON.")],
    speculator: Annotated[Path, typer.Option(help="A head of the model.")],
    index: Annotated[list[Path] | None, typer.Option(help="Index to draft from.")] = None,
    model: Annotated[str, typer.Option(help="The model.")] = DEFAULT_MODEL,
    nodes: Annotated[int, typer.Option(help="Of every draft.", min=1)] = 5,
    per_category: Annotated[int, typer.Option(help="Prompts of each that are kept.", min=1)] = 2,
    warm: Annotated[int, typer.Option(help="Other prompts, answered before.", min=0)] = 40,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens for each.", min=2)] = 48,
    cost: Annotated[list[float] | None, typer.Option(help="Of a reader's pass.")] = None,
    dtype: Annotated[Precision, typer.Option(help="What to compute in.")] = Precision.BFLOAT16,
) -> None:
    """Measure what each pass of a head adds to fused drafts."""
    language_model = load_model(ModelOptions(model, precision=dtype))
    measured = read_prompts(prompts, per_category=per_category)
    texts = {prompt.text for prompt in measured}
    others = [prompt for prompt in read_prompts(prompts) if prompt.text not in texts][:warm]
    asked = Prompts(*([p.encoded(language_model) for p in part] for part in (others, measured)))
    drafts = DrafterSettings(index=index or [], speculator=speculator)
    [reader] = drafts.readers(language_model)
    drafter = EmbeddedDrafter.open_indexes(index or [], vocabulary=language_model.vocabulary)
    try:
        fused = watched(language_model, [drafter], reader)
        gained = watch(language_model, fused, asked, nodes, max_new_tokens)
    finally:
        drafter.shut_down()
    report = {
        **circumstances(language_model),
        "nodes": nodes,
        "warm_prompts": len(asked.warm),
        "prompts": len(asked.measured),
        **summary(gained, cost or [0.02, 0.05, 0.1]),
        "gained": [asdict(each) for each in gained],
    }
    output.write_text(json.dumps(report), encoding="utf-8")
    typer.echo(json.dumps({name: report[name] for name in report if name != "gained"}, indent=1))


if __name__ == "__main__":
    typer.run(main)
