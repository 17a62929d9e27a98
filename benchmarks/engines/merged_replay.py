"""What retrieval brings on top of a trained drafter: recordings replayed with a scripted one.

A draft changes no greedy output, so what a step would have accepted follows from the output. The
trained drafter is scripted (`scripted_head.py`): it knows the recorded output and is right as often
as it is told to be. Ways are compared at the same number of nodes: the drafter alone, retrieval
alone, both merged with the drafter run in every step, and merged with it skipped where it does not
pay. The merge is the one of the engines' adapters.

Times are modelled, not measured: a pass of the target takes `TARGET_S`, a pass of the drafter's
own layer `HEAD_S`; a draft of k positions takes k - 1 of those, and one more reads what was
accepted, skipped or not. What retrieval and the merge take is measured here and added, though an
engine may do it while its device is busy.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product, zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.engines.scripted_head import ScriptedHead, Shape
from decoder.engines.engine_sessions import DrafterSessions
from decoder.speculators.trained_drafts import MergedSequence, TrainedDrafts, trained_tree
from retriever.drafter import TokenIds
from retriever.follower import Follower
from retriever.replay.traces import ChatEncoder, Trace, read_outputs, read_traces
from retriever.sequences import TokenSequence
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree

TARGET_S: Final = 0.02
HEAD_S: Final = 0.001
"""A twentieth of a pass: one layer and the vocabulary's, of a model of 32 layers."""

WAYS: Final = ("drafter", "retrieval", "merged", "skipping")


SHAPES: Final = (
    Shape(8, 7, 1),
    Shape(8, 4, 2),
    Shape(16, 5, 4),
    Shape(32, 6, 8),
    Shape(64, 7, 8),
)
"""Chains as for MTP, trees as for EAGLE-3."""


@dataclass(slots=True)
class Tally:
    """Counts of a replay.

    Attributes:
        tokens: that came.
        rows: steps, counted once for each sequence.
        steps: of the batch.
        skipped: those in which the drafter was not run.
        own_s: measured seconds of retrieval and merging.
    """

    tokens: int = 0
    rows: int = 0
    steps: int = 0
    skipped: int = 0
    own_s: float = 0.0

    def report(self, shape: Shape, way: str) -> dict[str, float]:
        """Return its figures; see the module for the model of time."""
        asked = 0 if way == "retrieval" else self.steps - self.skipped
        reads = 0 if way == "retrieval" else self.steps
        seconds = self.steps * TARGET_S + (asked * (shape.steps - 1) + reads) * HEAD_S
        return {
            "tokens_per_step": self.tokens / self.rows,
            "skip_rate": self.skipped / self.steps,
            "modelled_ms_per_token": 1000 * (seconds + self.own_s) / self.tokens,
            "own_ms_per_step": 1000 * self.own_s / self.steps,
        }


class Lane:
    """One recorded output that is being written again.

    Args:
        number: of the recording.
        trace: the recording; its first output token is committed already.
        sessions: of the retrieving drafter.
        merging: of the way.
    """

    def __init__(
        self, number: int, trace: Trace, sessions: DrafterSessions, merging: TrainedDrafts
    ) -> None:
        self.number = number
        self.output: list[int] = trace.output.tolist()
        self.done = 1
        first = np.append(trace.prompt, trace.output[:1]).astype(np.int32)
        self.follower: Follower = sessions.follow(first, len(trace.prompt))
        self.sequence: TokenSequence = self.follower.sequence
        self.merged: MergedSequence = merging.follow(self.sequence)

    @property
    def came(self) -> list[int]:
        """What the target goes on to write."""
        return self.output[self.done :]

    def trained(self, head: ScriptedHead, shape: Shape, merging: TrainedDrafts) -> DraftTree:
        """Return what the trained drafter has for it."""
        came = self.came[: shape.steps]
        if shape.width == 1:
            return merging.chain(head.chain(self.number, self.done, came, shape.steps))
        return trained_tree(*head.tree(self.number, self.done, came, shape))


class Replay:
    """One way of drafting, over all recordings, some of them at once.

    Args:
        way: one of `WAYS`.
        head: the trained drafter.
        shape: how it is set up.
        warm: outputs that came before.
        batch: recordings that are replayed at once.
    """

    def __init__(
        self, way: str, head: ScriptedHead, shape: Shape, warm: Sequence[TokenIds], batch: int
    ) -> None:
        self._way, self._head, self._shape, self._batch = way, head, shape, batch
        self._drafter = EmbeddedDrafter()
        for output in warm:
            self._drafter.remember(output)
        self._sessions = DrafterSessions(self._drafter)
        self._merging = TrainedDrafts()
        self.tally = Tally()

    def run(self, traces: Sequence[Trace]) -> Tally:
        """Replay all recordings."""
        waiting = iter(enumerate(traces))
        lanes = list(self._begun(islice(waiting, self._batch)))
        while lanes:
            self._step(lanes)
            lanes = [lane for lane in lanes if not self._is_over(lane)]
            lanes += self._begun(islice(waiting, self._batch - len(lanes)))
        self._drafter.shut_down()
        return self.tally

    def _begun(self, traces: Iterator[tuple[int, Trace]]) -> Iterator[Lane]:
        for number, trace in traces:
            yield Lane(number, trace, self._sessions, self._merging)

    def _is_over(self, lane: Lane) -> bool:
        if lane.came:
            return False
        lane.follower.close()
        return True

    def _step(self, lanes: Sequence[Lane]) -> None:
        most, is_chain = self._shape.nodes - 1, self._shape.width == 1
        start_s = time.perf_counter()
        retrieved = [DraftTree.empty()] * len(lanes)
        if self._way != "drafter":
            retrieved = self._sessions.draft([(lane.follower, most) for lane in lanes])
        asks = self._way != "retrieval"
        if self._way == "skipping":
            asks = self._merging.asks(retrieved)
        own_s = time.perf_counter() - start_s
        trained = [
            lane.trained(self._head, self._shape, self._merging) if asks else None for lane in lanes
        ]
        start_s = time.perf_counter()
        trees = [
            self._verified(lane, tree, other, most, is_chain=is_chain)
            for lane, tree, other in zip(lanes, retrieved, trained, strict=True)
        ]
        own_s += time.perf_counter() - start_s
        came = [
            lane.came[: len(tree.follow(np.array(lane.came))) + 1]
            for lane, tree in zip(lanes, trees, strict=True)
        ]
        start_s = time.perf_counter()
        for lane, tokens in zip(lanes, came, strict=True):
            self._merging.commit(lane.merged, np.array(tokens, np.int32), most)
        own_s += time.perf_counter() - start_s
        self._count(lanes, came, own_s if self._way != "drafter" else 0.0, asks=asks)

    def _verified(
        self,
        lane: Lane,
        retrieved: DraftTree,
        trained: DraftTree | None,
        most: int,
        *,
        is_chain: bool,
    ) -> DraftTree:
        if self._way == "drafter" and trained is not None:
            return trained.prefix(most)
        if self._way == "retrieval":
            return retrieved.best_chain(most) if is_chain else retrieved.prefix(most)
        return self._merging.merge(lane.merged, retrieved, trained, most, is_chain=is_chain)

    def _count(
        self, lanes: Sequence[Lane], came: list[list[int]], own_s: float, *, asks: bool
    ) -> None:
        num_tokens = 0
        for lane, tokens in zip(lanes, came, strict=True):
            lane.done += len(tokens)
            num_tokens += len(tokens)
        draft_s = (self._shape.steps - 1) * HEAD_S if asks else 0.0
        if asks:
            self._merging.note_asked(draft_s)
        self._merging.note_step(TARGET_S + HEAD_S + draft_s + own_s, num_tokens)
        self.tally.tokens += num_tokens
        self.tally.rows += len(lanes)
        self.tally.steps += 1
        self.tally.skipped += not asks and self._way == "skipping"
        self.tally.own_s += own_s


@dataclass(frozen=True, slots=True)
class Recordings:
    """Outputs that are replayed.

    Attributes:
        name: of their file.
        traces: what is replayed.
        warm: outputs that came before.
    """

    name: str
    traces: Sequence[Trace]
    warm: Sequence[TokenIds]

    def replayed(self, head: ScriptedHead, shape: Shape, batch: int) -> dict[str, Any]:
        """Return the figures of each way."""
        ways = {
            way: Replay(way, head, shape, self.warm, batch).run(self.traces).report(shape, way)
            for way in WAYS
        }
        heads = {"top1": head.top1, "overconfident": head.is_overconfident}
        return {"trace": self.name, **asdict(shape), **heads, "batch": batch, "ways": ways}


def main() -> None:
    """Parse arguments, replay, and write the report."""
    options = _parser().parse_args()
    rows: list[dict[str, Any]] = []
    for recordings in _read(options):
        for head, shape, batch in _setups(options):
            rows.append(recordings.replayed(head, shape, batch))
            _say(rows[-1])
            _write(options, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines.merged_replay", description=__doc__
    )
    parser.add_argument("--trace", type=Path, action="append", required=True, help="recordings")
    parser.add_argument(
        "--warm", type=Path, action="append", default=[], help="outputs before the same trace"
    )
    parser.add_argument("--limit", type=int, default=40, help="recordings of each trace")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each recording")
    parser.add_argument("--top1", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="recordings at once")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def _read(options: argparse.Namespace) -> Iterator[Recordings]:
    encoder = ChatEncoder(None)
    for path, warm in zip_longest(options.trace, options.warm):
        traces = [each for each in read_traces(path, encoder) if len(each.output) > 1]
        spread = traces[:: max(1, len(traces) // options.limit)][: options.limit]
        cut = [Trace(each.prompt, each.output[: options.max_tokens]) for each in spread]
        before = [] if warm is None else list(read_outputs(warm, encoder))
        yield Recordings(path.name, cut, before)


def _setups(options: argparse.Namespace) -> Iterator[tuple[ScriptedHead, Shape, int]]:
    """Yield drafters; a chain's states no probability that could be too sure."""
    shapes = [shape for shape in SHAPES if shape.nodes in options.nodes]
    for shape, top1, batch in product(shapes, options.top1, options.batch):
        yield ScriptedHead(top1), shape, batch
        if shape.width > 1:
            yield ScriptedHead(top1, is_overconfident=True), shape, batch


def _write(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    report = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "target_s": TARGET_S,
        "head_s": HEAD_S,
        "limit": options.limit,
        "max_tokens": options.max_tokens,
        "rows": rows,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _say(row: dict[str, Any]) -> None:
    kind = "chain" if row["width"] == 1 else "tree"
    sure = "overconfident" if row["overconfident"] else "calibrated"
    told = [f"{row['trace']}, {kind} of {row['nodes']}, {row['top1']} {sure}, {row['batch']}:"]
    for way, figures in row["ways"].items():
        tokens, cost = figures["tokens_per_step"], figures["modelled_ms_per_token"]
        told.append(f"{way} {tokens:.2f} ({cost:.2f} ms)")
    told.append(f"{row['ways']['skipping']['skip_rate']:.0%} skipped")
    print("  ".join(told), flush=True)


if __name__ == "__main__":
    main()
