"""What a step takes beyond its pass where drafts are answered while the pass runs.

The target is a stand-in: a pass waits outside of the interpreter, as for a device, and brings what
a text goes on with. The texts are files of Python's standard library, cut into words and signs: new
ones, or those of the prompt with a word in sixty changed; or they are recorded outputs. Other files
were generated earlier. The drafter answers from the sequence and these, so many milliseconds away,
in this process or in a service of its own. Each setting is compared with the loop that asks once a
pass is over; all outputs are compared with the texts. Settings take turns over several rounds, and
figures are medians over these, as other work on the machine comes and goes.
"""

import json
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, Self, cast

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.comparison import circumstances
from decoder.budget.budget import FixedBudget
from decoder.drafters.fusion import FusedDrafter
from decoder.loop import Decoder, Generation, Request
from decoder.model.passes import Read, Reading
from decoder.model.target import Target
from decoder.sampling.verification import Acceptance, PassContext
from retriever.client.strict import RemoteDrafter
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.follower import DraftLimits, Followers
from retriever.replay.traces import ChatEncoder, Trace, read_traces
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import ROOT, DraftTree

_VOCABULARY: Final = 4096
_PROMPT: Final = 400
_CHANGED: Final = 1 / 60
_WORDS: Final = re.compile(r"\w+|[^\w\s]|\n[ ]*|[ ]+")
_FILES: Final = ("argparse", "ast", "cmd", "configparser", "csv", "difflib", "shlex", "textwrap")


def texts() -> list[TokenIds]:
    """Return int32[n] each, the files' words by their frequency; rare ones share the last ids."""
    library = Path(sysconfig.get_path("stdlib"))
    words = [_WORDS.findall((library / f"{name}.py").read_text()) for name in _FILES]
    ranked = Counter(word for each in words for word in each).most_common()
    ids = {word: min(rank, _VOCABULARY - 1) for rank, (word, _) in enumerate(ranked)}
    return [np.array([ids[word] for word in each], np.int32) for each in words]


def workloads(tokens: int) -> tuple[dict[str, list[Trace]], list[TokenIds]]:
    """Return texts by what they are, and earlier generations."""
    every = texts()
    held_out, rng = [each[: _PROMPT + tokens] for each in every[:2]], np.random.default_rng(0)
    edited = []
    for text in held_out:
        changed = np.where(rng.random(len(text)) < _CHANGED, rng.permutation(text), text)
        edited.append(Trace(text, changed.astype(np.int32)))
    new = [Trace(text[:_PROMPT], text[_PROMPT:]) for text in held_out]
    return {"new": new, "edited": edited}, every[2:]


def recorded(path: Path, tokens: int, limit: int) -> list[Trace]:
    """Return recorded outputs, so many tokens of each."""
    encoder = ChatEncoder(None)
    traces = read_traces(path, encoder, limit)
    return [Trace(each.prompt[-4096:], each.output[:tokens]) for each in traces]


class WaitingTarget:
    """A stand-in for a target: waits, and has nothing to say; see `Script`.

    Args:
        pass_s: how long a pass takes, in seconds.

    Attributes:
        passes_s: how long each has taken, in seconds.
    """

    packs = False
    selects = False
    ranks = None
    max_nodes = 256
    vocabulary_size = 1 << 20

    def __init__(self, pass_s: float) -> None:
        self._pass_s = pass_s
        self._logits = torch.zeros(1 + self.max_nodes, NUM_LOGITS)
        self.passes_s: list[float] = []

    def read(self, readings: Sequence[Reading]) -> list[Read]:
        """Wait as long as a pass takes."""
        began_s = time.perf_counter()
        time.sleep(self._pass_s)
        read = [Read(self._logits[: len(each.tokens)], {}) for each in readings]
        self.passes_s.append(time.perf_counter() - began_s)
        return read

    def checked_prompt(self, prompt: TokenIds) -> TokenIds:
        """Return the prompt."""
        return prompt

    def room(self, num_tokens: int, max_new_tokens: int) -> int:  # noqa: ARG002
        """Return as many tokens as are asked for."""
        return max_new_tokens

    def fitting(self, tree: DraftTree) -> DraftTree:
        """Return all of a tree."""
        return tree

    def make_places(self, count: int) -> None:
        """Need none."""

    def likest(self, tokens: TokenIds, places: Sequence[int]) -> int:  # noqa: ARG002
        """Return the first place."""
        return min(places)

    def resume(self, tokens: TokenIds, place: int) -> int:  # noqa: ARG002
        """Begin a sequence of which nothing was read."""
        return 0

    def reset(self, place: int = 0) -> None:
        """Keep nothing."""

    def commit_all(self, paths: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
        """Keep nothing."""


NUM_LOGITS: Final = 64


@dataclass
class Script:
    """Accepts what a text goes on with.

    Attributes:
        text: of one sequence.
    """

    text: TokenIds

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Return the script of a recorded output."""
        return cls(np.concatenate([trace.prompt, trace.output]))

    def __call__(self, tree: DraftTree, _logits: torch.Tensor, context: PassContext) -> Acceptance:
        """Follow the text down the tree."""
        edges = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
        children = {edge: node for node, edge in enumerate(edges)}
        path: list[int] = []
        at, node = context.position, ROOT
        while (below := children.get((node, int(self.text[at])))) is not None:
            path.append(below)
            node, at = below, at + 1
        return np.array(path, np.int64), int(self.text[at])


class Away:
    """A drafter so many seconds away; how it answers ahead is its own."""

    def __init__(self, drafter: Drafter, away_s: float) -> None:
        self._drafter: Any = drafter
        self._away_s = away_s
        self.num_outcomes = self.num_ahead = 0

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        """Begin a sequence."""
        self._drafter.open(session, prompt, remember=remember)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft, after the way there and back."""
        self._wait()
        return cast("list[DraftTree]", self._drafter.draft(requests))

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float
    ) -> list[list[DraftTree]]:
        """Draft ahead, after the way there and back."""
        self.num_ahead += len(requests)
        self.num_outcomes += sum(len(each.outcomes) for each in requests)
        self._wait()
        answers = self._drafter.draft_ahead(requests, timeout_s - self._away_s)
        return cast("list[list[DraftTree]]", answers)

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence."""
        self._drafter.close(session, new_tokens)

    def _wait(self) -> None:
        if self._away_s:
            time.sleep(self._away_s)


@dataclass
class Measured:
    """One setting.

    Attributes:
        workload: what is written.
        place: of the drafter: "process" or "service".
        away_ms: how far it is.
        num_ahead: outcomes that are asked ahead; 0 for the loop that asks afterwards.
        parallel: sequences in a pass.
        is_fused: whether its trees go through the fused drafter.
        num_steps: passes after the prompts'.
        tokens_per_pass: of a sequence.
        outcomes: guessed for a sequence in a pass, in the mean.
        share_ahead: of the drafts, those that were answered ahead.
        beyond_pass_ms: what a step took beyond its pass: quartiles.
        beyond_if_ahead_ms: the same of steps whose drafts were all answered ahead.
        beyond_if_asked_ms: the same of the others.
        num_rounds: times that it was measured; figures are medians over them.
        tokens_per_second: of all sequences.
        is_identical: whether all outputs are the texts.
    """

    workload: str
    place: str
    away_ms: float
    num_ahead: int
    parallel: int
    is_fused: bool
    num_steps: int = 0
    tokens_per_pass: float = 0.0
    outcomes: float = 0.0
    share_ahead: float = 0.0
    beyond_pass_ms: list[float] = field(default_factory=list)
    beyond_if_ahead_ms: list[float] = field(default_factory=list)
    beyond_if_asked_ms: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    num_rounds: int = 1
    is_identical: bool = False

    @classmethod
    def over(cls, rounds: Sequence["Measured"]) -> "Measured":
        """Return one setting's figures over several rounds."""
        first = rounds[0]
        medians: dict[str, Any] = {
            name: statistics.median(getattr(each, name) for each in rounds)
            for name in ("tokens_per_pass", "outcomes", "share_ahead", "tokens_per_second")
        }
        for name in ("beyond_pass_ms", "beyond_if_ahead_ms", "beyond_if_asked_ms"):
            of_rounds = [getattr(each, name) for each in rounds if getattr(each, name)]
            medians[name] = [statistics.median(each) for each in zip(*of_rounds, strict=True)]
        is_identical = all(each.is_identical for each in rounds)
        return replace(first, num_rounds=len(rounds), is_identical=is_identical, **medians)

    def line(self) -> str:
        """Return it in words."""
        kind = f"{self.num_ahead} ahead" if self.num_ahead else "asked afterwards"
        medians = [
            f"{quartiles[1]:.3f}" if quartiles else "-"
            for quartiles in (self.beyond_pass_ms, self.beyond_if_ahead_ms, self.beyond_if_asked_ms)
        ]
        return (
            f"{self.workload}, {self.place}, {self.away_ms:g} ms away, {self.parallel} at a time"
            f"{', fused' if self.is_fused else ''}, {kind}: step beyond its pass {medians[0]} ms "
            f"(answered ahead {medians[1]}, others {medians[2]}), {self.share_ahead:.0%} of drafts "
            f"ahead of {self.outcomes:.1f} outcomes, {self.tokens_per_pass:.2f} tokens a pass, "
            f"{self.tokens_per_second:.0f} tokens/s"
            f"{'' if self.is_identical else ', OUTPUTS DIFFER'}"
        )


@contextmanager
def _drafter(place: str, earlier: Sequence[TokenIds]) -> Iterator[Drafter]:
    """Give a drafter that has generated some texts before."""
    if place == "process":
        drafter = EmbeddedDrafter()
        drafter.warm()
        for text in earlier:
            drafter.remember(text)
        yield drafter
        drafter.shut_down()
        return
    command = [sys.executable, "-m", "retriever", "serve", "--address", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        with RemoteDrafter(line.removeprefix("serving on ").strip(), timeout_s=5.0) as remote:
            for number, text in enumerate(earlier):
                remote.open(f"earlier-{number}", text[:1])
                remote.close(f"earlier-{number}", text[1:])
            yield remote
    finally:
        process.terminate()
        process.communicate(timeout=30)


def _measure(
    setting: Measured,
    drafter: Drafter,
    traces: Sequence[Trace],
    pass_s: float,
    nodes: int,
) -> None:
    """Decode all texts; fill in what came of it."""
    target = WaitingTarget(pass_s)
    away = Away(drafter, setting.away_ms / 1e3)
    member: Drafter = away
    if setting.is_fused:
        member = FusedDrafter([away], DraftLimits())
    decoder = Decoder(
        cast("Target", target), member, FixedBudget(nodes), num_ahead=setting.num_ahead
    )
    requests = [
        Request(each.prompt, len(each.output) - 1, remember=False, accept=Script.of(each))
        for each in traces
    ]
    steps = _Steps(decoder, requests, setting.parallel)
    beyond_s = np.diff(steps.ended_s) - target.passes_s
    setting.num_steps = len(beyond_s)
    num_tokens = sum(map(len, steps.outputs.values()))
    setting.tokens_per_pass = num_tokens / steps.num_passes
    setting.tokens_per_second = num_tokens / (steps.ended_s[-1] - steps.ended_s[0])
    was_asked = np.diff(steps.num_asked) > 0
    setting.beyond_pass_ms = _quartiles_ms(beyond_s)
    setting.beyond_if_ahead_ms = _quartiles_ms(beyond_s[~was_asked])
    setting.beyond_if_asked_ms = _quartiles_ms(beyond_s[was_asked])
    setting.outcomes = away.num_outcomes / max(1, away.num_ahead)
    num_ahead, num_asked = steps.followers.num_ahead, steps.followers.num_asked
    setting.share_ahead = num_ahead / max(1, num_ahead + num_asked)
    setting.is_identical = all(
        steps.outputs[number] == each.output[:-1].tolist() for number, each in enumerate(traces)
    )


def _quartiles_ms(seconds: NDArray[np.float64]) -> list[float]:
    return [1e3 * each for each in statistics.quantiles(seconds, n=4)] if len(seconds) > 1 else []


class _Steps:
    """Decodes all requests, and notes each step.

    Attributes:
        ended_s: when each was over, its tokens out; the first is the beginning.
        num_asked: drafts that had been waited for by then.
        outputs: tokens by request.
        num_passes: that sequences had a part in.
    """

    def __init__(self, decoder: Decoder, requests: Sequence[Request], parallel: int) -> None:
        target = cast("WaitingTarget", decoder.target)
        self.followers = _followers_of(decoder)
        self.outputs: dict[int, list[int]] = {number: [] for number in range(len(requests))}
        self.ended_s, self.num_asked = [time.perf_counter()], [0]
        generations: dict[int, Generation] = {}
        for generation, tokens in decoder.generate_many(requests, parallel):
            generations[generation.number] = generation
            self.outputs[generation.number] += tokens
            if len(self.ended_s) == len(target.passes_s):  # the first sequence of this pass
                self.ended_s.append(0.0)
                self.num_asked.append(self.followers.num_asked)
            self.ended_s[-1] = time.perf_counter()
        self.num_passes = sum(each.statistics.num_passes for each in generations.values())


def _followers_of(decoder: Decoder) -> Followers:
    """Return the followers that ask the drafter."""
    if isinstance(decoder.drafter, FusedDrafter):
        return decoder.drafter._followers[0]  # noqa: SLF001
    return decoder.followers


def main(  # noqa: PLR0913, PLR0917  (options)
    output: Annotated[Path | None, typer.Option(help="Write all figures to a file.")] = None,
    pass_ms: Annotated[float, typer.Option(help="How long a pass takes.")] = 5.0,
    nodes: Annotated[int, typer.Option(help="Nodes that are verified.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 1600,
    away: Annotated[list[float] | None, typer.Option(help="Milliseconds to the drafter.")] = None,
    ahead: Annotated[list[int] | None, typer.Option(help="Outcomes asked ahead.")] = None,
    traces: Annotated[
        list[Path] | None, typer.Option(help="Recorded outputs instead of texts.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Recorded outputs of each file.")] = 4,
    rounds: Annotated[int, typer.Option(help="Times that all settings are measured.")] = 3,
) -> None:
    """Measure what steps take beyond their passes, with drafts asked ahead and afterwards."""
    of_kinds, earlier = workloads(tokens)
    if traces:
        of_kinds = {path.name: recorded(path, tokens, limit) for path in traces}
    measured: dict[tuple[Any, ...], list[Measured]] = {}
    with ExitStack() as drafters:
        places = {
            place: drafters.enter_context(_drafter(place, earlier))
            for place in ("process", "service")
        }
        for setting in _settings(list(places), list(of_kinds), away, ahead) * rounds:
            each = replace(setting)
            _measure(each, places[each.place], of_kinds[each.workload], pass_ms / 1e3, nodes)
            measured.setdefault(tuple(asdict(setting).values())[:6], []).append(each)
    settings = [Measured.over(each) for each in measured.values()]
    for setting in settings:
        typer.echo(setting.line())
    if output is not None:
        figures = {
            "circumstances": circumstances(),
            "pass_ms": pass_ms,
            "nodes": nodes,
            "tokens": tokens,
            "rounds": rounds,
            "settings": [asdict(each) for each in settings],
        }
        output.write_text(json.dumps(figures, indent=1) + "\n")


def _settings(
    places: Sequence[str],
    kinds: Sequence[str],
    away: Sequence[float] | None,
    ahead: Sequence[int] | None,
) -> list[Measured]:
    """Return all settings; several at a time and fused ones only for the shortest way."""
    ways = away or [1.0, 3.0]
    forms = [(way, 1, False) for way in ways] + [(ways[0], 1, True), (ways[0], 2, False)]
    # Those that are compared with each other follow one another.
    return [
        Measured(kind, place, way, num_ahead, parallel, is_fused)
        for kind, place, (way, parallel, is_fused) in product(kinds, places, forms)
        for num_ahead in [0, *(ahead or [5, 16])]
    ]


if __name__ == "__main__":
    typer.run(main)
