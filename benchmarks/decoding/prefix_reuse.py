"""Time to the first token of each turn of an agent, with what was read before and without.

    python -m benchmarks.decoding.prefix_reuse --recordings agent.jsonl.gz --output FILE

Takes a recorded conversation and decodes a few tokens of each of its turns: once by a target that
goes on from what it still holds, and once by one that forgets before each turn. Prompts are the
recorded ones, so both read the same texts. The two take turns, and their outputs are compared.
"""

import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer

from decoder.budget.budget import FixedBudget
from decoder.drafters.following import NoDrafter
from decoder.loop import Decoder
from decoder.model.passes import Reading
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from decoder.plugins.bench.bench import circumstances
from indexer.tokenizer import DEFAULT_MODEL

_LONG: Final = 4000
"""Tokens of a prompt from which on a turn counts as a long one."""


_ENDING: Final = 400
"""Characters by which the end of a prompt is found in the next one."""


@dataclass(slots=True)
class Turn:
    """One turn of the conversation, decoded by both.

    Attributes:
        tokens: of its prompt.
        read: of them by the target that goes on.
        resumed_s: until its first token.
        again_s: until the first token of the target that forgets.
        is_identical: whether both wrote the same.
    """

    tokens: int
    read: int
    resumed_s: float
    again_s: float
    is_identical: bool

    @property
    def ratio(self) -> float:
        """How many times as long the target takes that forgets."""
        return self.again_s / self.resumed_s


class CountingTarget(Target):
    """Counts the tokens of prompts that it reads."""

    num_read = 0

    def read(self, readings: Sequence[Reading]) -> Any:
        """See `Target.read`."""
        self.num_read += sum(len(each.tokens) for each in readings if each.tree is None)
        return super().read(readings)


def conversation_of(path: Path, num_turns: int) -> list[str]:
    """Return the prompts of the shortest conversation with so many turns, each whole.

    Recordings hold the end of what was said before a turn: what is new in a prompt follows the end
    of the one before.
    """
    conversations: list[list[str]] = []
    group = None
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for row in map(json.loads, lines):
            before = conversations[-1][-1] if row["group"] == group else ""
            ending = before[-_ENDING:]
            at = row["prompt"].find(ending) if ending else -1
            if at >= 0:
                conversations[-1].append(before + row["prompt"][at + len(ending) :])
            elif row["prompt"]:
                conversations.append([row["prompt"]])
            group = row["group"] if row["prompt"] else None
    long_enough = [prompts[:num_turns] for prompts in conversations if len(prompts) >= num_turns]
    if not long_enough:
        raise typer.BadParameter(f"{path} holds no conversation of {num_turns} turns")
    return min(long_enough, key=lambda prompts: len(prompts[-1]))


def shortened(prompts: Sequence[str], most: int) -> list[str]:
    """Return prompts in which no turn adds more than `most` characters."""
    kept = [prompts[0][:most]]
    for before, prompt in pairwise(prompts):
        kept.append(kept[-1] + prompt[len(before) :][:most])
    return kept


def decode(decoder: Decoder, prompt: list[int], max_new_tokens: int) -> tuple[float, list[int]]:
    """Return seconds until the first token, and all tokens."""
    began_s = time.perf_counter()
    first_s, tokens = 0.0, []
    for step in decoder.generate(prompt, max_new_tokens):
        first_s = first_s or time.perf_counter() - began_s
        tokens += step
    return first_s, tokens


def compare(language_model: LanguageModel, prompts: Sequence[str], count: int) -> list[Turn]:
    """Decode some tokens of each turn by both targets."""
    targets = [CountingTarget(language_model.model, reuse_prefixes=True) for _ in range(2)]
    resuming, forgetful = (Decoder(each, NoDrafter(), FixedBudget(0)) for each in targets)
    most = (targets[0].max_length or 1 << 20) - count
    turns = []
    for prompt in prompts:
        tokens = language_model.tokenizer.encode(prompt, add_special_tokens=False)
        if not 0 < len(tokens) <= most:
            continue
        targets[0].num_read = 0
        targets[1].forget()
        again_s, expected = decode(forgetful, tokens, count)
        resumed_s, output = decode(resuming, tokens, count)
        turns.append(Turn(len(tokens), targets[0].num_read, resumed_s, again_s, output == expected))
        typer.echo(json.dumps(asdict(turns[-1])), err=True)
    return turns


def main(  # noqa: PLR0913  options
    *,
    recordings: Annotated[Path, typer.Option(help="Recorded turns with `group` and `prompt`.")],
    model: str = DEFAULT_MODEL,
    dtype: Precision = Precision.FLOAT32,
    turns: Annotated[int, typer.Option(help="Turns of the conversation.")] = 20,
    longest_turn: Annotated[int, typer.Option(help="Most characters that a turn adds.")] = 1000,
    max_new_tokens: int = 8,
    output: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Compare times to the first token."""
    language_model = load_model(ModelOptions(model, precision=dtype))
    prompts = shortened(conversation_of(recordings, turns), longest_turn)
    found = compare(language_model, prompts, max_new_tokens)
    later = found[1:]
    long = [turn for turn in later if turn.tokens >= _LONG]
    report = {
        **circumstances(language_model),
        "num_turns": len(found),
        "tokens_of_prompts": sum(turn.tokens for turn in found),
        "tokens_read": sum(turn.read for turn in found),
        "all_identical": all(turn.is_identical for turn in found),
        "median_ratio_of_later_turns": median(turn.ratio for turn in later),
        "median_ratio_of_long_turns": median(turn.ratio for turn in long) if long else None,
        "turns": [asdict(turn) for turn in found],
    }
    text = json.dumps(report, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
