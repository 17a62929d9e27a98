"""The cost of learning from the target's logits, compared with the passes that it learns from.

    python -m benchmarks.decoding.learning_cost --prompts questions.jsonl --index my.index

Prompts are decoded as `decoder generate` does, and every call in which the drafter takes in a pass
is timed: finding the likely tokens of each row, keeping them, and moving the weights.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from decoder.assembly import DrafterSettings, assemble
from decoder.commands.bench import circumstances
from decoder.commands.prompts import read_prompts
from decoder.drafters.following import Verified
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.observation import Statistics
from indexer.tokenizer import DEFAULT_MODEL
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.follower import Learner
from retriever.tree import DraftTree


class TimedDrafter:
    """A drafter whose calls are timed.

    Args:
        drafter: what drafts and, if it can, learns.

    Attributes:
        learning_s: seconds of each pass that was learned from; the prompts' are left out.
        drafting_s: seconds of each draft.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._learner = drafter if isinstance(drafter, Learner) else None
        self.learning_s: list[float] = []
        self.drafting_s: list[float] = []

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        """Begin a sequence; see `Drafter.open`."""
        self._drafter.open(session, prompt, remember=remember)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft; see `Drafter.draft`."""
        start = time.perf_counter()
        trees = self._drafter.draft(requests)
        self.drafting_s.append(time.perf_counter() - start)
        return trees

    def learn(self, session: str, verified: Verified) -> None:
        """Learn from a pass; see `Learner.learn`."""
        if self._learner is None:
            return
        start = time.perf_counter()
        self._learner.learn(session, verified)
        if len(verified.tree):
            self.learning_s.append(time.perf_counter() - start)

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence; see `Drafter.close`."""
        self._drafter.close(session, new_tokens)


def measure(
    language_model: LanguageModel, options: DrafterSettings, texts: list[str], max_new_tokens: int
) -> dict[str, Any]:
    """Decode prompts, the first of them unmeasured, and return medians and learning's share."""
    done = Statistics()
    with options.connect(language_model) as drafter:
        timed = TimedDrafter(drafter)
        decoder = assemble(language_model, timed)
        for number, text in enumerate(texts):
            generation = decoder.generate(language_model.encode(text), max_new_tokens)
            for _ in generation:
                pass
            if number == 0:  # compiles, and fills caches
                timed.learning_s, timed.drafting_s = [], []
            else:
                done.add(generation.statistics)
    steps = done.num_passes - (len(texts) - 1)
    step_s = (done.total_s - done.prompt_s) / steps
    return {
        "steps": steps,
        "step_ms": round(1e3 * step_s, 3),
        "learning_us": round(1e6 * statistics.median(timed.learning_s), 1),
        "drafting_us": round(1e6 * statistics.median(timed.drafting_s), 1),
        "learning_share": round(sum(timed.learning_s) / (steps * step_s), 4),
        "rows_learned": round(1 + done.num_drafted / steps, 2),
    }


def main(  # noqa: PLR0913, PLR0917  as many as a command has
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    index: Annotated[list[Path] | None, typer.Option(help="Index to draft from.")] = None,
    model: Annotated[str, typer.Option(help="The model.")] = DEFAULT_MODEL,
    limit: Annotated[int, typer.Option(min=2, help="Prompts, the unmeasured one included.")] = 27,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens for each.")] = 128,
    dtype: Annotated[Precision, typer.Option(help="What to compute in.")] = Precision.BFLOAT16,
) -> None:
    """Measure what learning costs and print it as JSON."""
    language_model = load_model(ModelOptions(model, precision=dtype))
    texts = [prompt.text for prompt in read_prompts(prompts, limit)]
    found = measure(language_model, DrafterSettings(index=index or []), texts, max_new_tokens)
    print(json.dumps({**circumstances(language_model), **found}, indent=1))


if __name__ == "__main__":
    typer.run(main)
