"""Counts and times of sequences, observers of passes, and watchers of long-running work."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from decoder.stopping import StopRule
from retriever.tree import DraftTree, Source

_SHOWN: Final = 4
"""Number of draft positions whose acceptance rate the summary shows."""


@dataclass(slots=True)
class Statistics:
    """Counts and times of one sequence, or sums over many.

    Attributes:
        num_passes: forward passes of the target, including those over the prompt.
        num_tokens: number of generated tokens.
        num_drafts: number of passes that verified a draft.
        num_drafted: number of draft-tree nodes verified.
        drafted: number of verified nodes by their dominant source.
        widths: number of passes after the prompt's, by the number of nodes that they verified.
        accepted: number of accepted nodes by their dominant source.
        accepted_at: number of accepted nodes by their position in the draft, 0 for the first.
        num_failures: number of draft requests that the drafter refused or failed to answer.
        draft_s: seconds spent in the drafter.
        target_s: seconds spent in the target model, including the wait for its chosen tokens.
        prompt_s: the part of `target_s` spent on the prompt.
        total_s: total seconds from the first token to the last; the loop itself takes the time
            outside drafter and target.
    """

    num_passes: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    drafted: Counter[Source] = field(default_factory=Counter)
    widths: Counter[int] = field(default_factory=Counter)
    accepted: Counter[Source] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    num_failures: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    prompt_s: float = 0.0
    total_s: float = 0.0

    @property
    def host_s(self) -> float:
        """Seconds spent outside the drafter and the target."""
        return self.total_s - self.draft_s - self.target_s

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of generated tokens per target pass, including the target's own token."""
        return self.num_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of total time."""
        return self.num_tokens / self.total_s if self.total_s else 0.0

    @property
    def num_accepted(self) -> int:
        """Number of accepted nodes."""
        return self.accepted.total()

    def accepted_per_position(self) -> list[int]:
        """Return how many drafts had a node accepted at each position, in order of position.

        Divide by `num_drafts` for the share of drafts that are right up to that position.
        """
        return [self.accepted_at[at] for at in range(len(self.accepted_at))]

    def accepted_by_source(self) -> dict[str, int]:
        """Return the number of accepted nodes by source name, largest number first."""
        return {source.name.lower(): count for source, count in self.accepted.most_common()}

    def report(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            "num_tokens": self.num_tokens,
            "num_passes": self.num_passes,
            "num_drafts": self.num_drafts,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "accepted_per_position": self.accepted_per_position(),
            "drafted": {each.label: count for each, count in self.drafted.most_common()},
            "widths": {str(width): self.widths[width] for width in sorted(self.widths)},
            "accepted": self.accepted_by_source(),
            "num_failures": self.num_failures,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_pass": self.tokens_per_pass,
            "seconds": self.total_s,
            "draft_seconds": self.draft_s,
            "target_seconds": self.target_s,
            "prompt_seconds": self.prompt_s,
            "host_seconds": self.host_s,
        }

    def engine_metrics(self) -> dict[str, float]:
        """Return the figures by series, under the names of engines' own speculation metrics.

        Counters have vLLM's names (`vllm:spec_decode_…`), gauges SGLang's (`sglang:spec_…`), so
        that existing dashboards work for any engine.
        """
        names = {
            "vllm:spec_decode_num_drafts_total": self.num_drafts,
            "vllm:spec_decode_num_draft_tokens_total": self.num_drafted,
            "vllm:spec_decode_num_accepted_tokens_total": self.num_accepted,
        }
        positions = {
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{at}"}}': count
            for at, count in enumerate(self.accepted_per_position())
        }
        by_source = {
            f'foredraft_{name}_total{{source="{source.label}"}}': count
            for name, counts in (("nodes", self.drafted), ("accepted_tokens", self.accepted))
            for source, count in counts.items()
        }
        gauges = {
            "sglang:spec_accept_length": self.tokens_per_pass,
            "sglang:spec_accept_rate": self.num_accepted / max(self.num_drafted, 1),
        }
        return {**names, **positions, **by_source, **gauges}

    def exposition(self) -> str:
        """Return `engine_metrics` in the Prometheus text format, for a `/metrics` page."""
        lines: list[str] = []
        told: set[str] = set()
        for series, value in self.engine_metrics().items():
            name = series.partition("{")[0]
            if name not in told:
                told.add(name)
                lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
            lines.append(f"{series} {value}")
        return "\n".join([*lines, ""])

    def summary(self) -> str:
        """Return the main figures in one line."""
        shares = [
            f"{name} {count / self.num_tokens:.0%}"
            for name, count in self.accepted_by_source().items()
        ]
        failed = counted(self.num_failures, "draft")
        failures = f"; {failed} failed" if self.num_failures else ""
        if self.num_drafts:
            failures = f"; {self._first_positions()}{failures}"
        return (
            f"{counted(self.num_tokens, 'token')}, {self.tokens_per_second:.1f} tokens/s, "
            f"{self.tokens_per_pass:.2f} tokens per pass; "
            f"drafted: {', '.join(shares) or 'none'}{self._widths()}{failures}"
        )

    def _first_positions(self) -> str:
        """Return a few words about the share of drafts whose first nodes were accepted."""
        rates = [count / self.num_drafts for count in self.accepted_per_position()[:_SHOWN]]
        return f"right at 1, 2, …: {', '.join(f'{rate:.0%}' for rate in rates) or 'never'}"

    def _widths(self) -> str:
        """Return a few words about the mean number of nodes per pass."""
        passes = self.widths.total()
        if not passes:
            return ""
        return (
            f"; {self.num_drafted / passes:.1f} nodes a pass, none in {self.widths[0] / passes:.0%}"
        )

    def add(self, other: "Statistics") -> None:
        """Add another sequence's figures to these."""
        self.num_passes += other.num_passes
        self.num_tokens += other.num_tokens
        self.num_drafts += other.num_drafts
        self.num_drafted += other.num_drafted
        self.drafted.update(other.drafted)
        self.widths.update(other.widths)
        self.accepted.update(other.accepted)
        self.accepted_at.update(other.accepted_at)
        self.num_failures += other.num_failures
        self.draft_s += other.draft_s
        self.target_s += other.target_s
        self.prompt_s += other.prompt_s
        self.total_s += other.total_s

    def record(self, tree: DraftTree, path: NDArray[np.int64], num_tokens: int) -> None:
        """Count a pass over a draft tree of which the nodes in `path` were accepted."""
        if self.num_passes:
            self.widths[len(tree)] += 1
        self.num_passes += 1
        self.num_tokens += num_tokens
        if len(tree) == 0:
            return
        self.num_drafts += 1
        self.num_drafted += len(tree)
        for source, count in enumerate(np.bincount(tree.sources).tolist()):
            if count:
                self.drafted[Source(source)] += count
        self.accepted.update(map(Source, tree.sources[path].tolist()))
        self.accepted_at.update(range(len(path)))

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Add the block's time to `draft_s`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.draft_s += seconds
            self.total_s += seconds


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, in singular or plural."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds that a pass spent in each part.

    Attributes:
        draft_s: seconds in the drafter.
        target_s: seconds in the target, including the wait for its chosen tokens.
        host_s: seconds in the loop itself.
    """

    draft_s: float
    target_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        """Total seconds of the pass."""
        return self.draft_s + self.target_s + self.host_s


@dataclass(frozen=True, slots=True, eq=False)
class ObservedPass:
    """One pass of the target, possibly over the prompt, as an observer sees it.

    Attributes:
        drafted: the drafter's tree, cut to what the model can verify and to the token limit.
        tree: the first nodes of `drafted`, which were verified.
        path: int64[k], the accepted nodes that the sequence keeps, from the root down.
        tokens: the committed tokens: those of the path, then the target's own token unless the
            sequence ended earlier.
        times: the time that the pass took; this sequence's share if it held several sequences.
        num_sequences: number of sequences whose trees the pass verified.
        width: number of tokens in the pass, over all sequences.
    """

    drafted: DraftTree
    tree: DraftTree
    path: NDArray[np.int64]
    tokens: list[int]
    times: Times
    num_sequences: int = 1
    width: int = 1


Observer = Callable[[ObservedPass], object]
"""Called once for every pass, after the pass's tokens were emitted. An error in it ends the
sequence."""


@dataclass(frozen=True, slots=True)
class Watch:
    """A rule that may end a sequence, and an observer of the sequence's passes."""

    stop_rule: StopRule | None = None
    observer: Observer | None = None


class Watcher(Protocol):
    """Receives the progress of long-running work."""

    def __call__(self, stage: str, over: float, told: str, /) -> None:
        """Show progress: the stage, its finished share from 0 to 1, and a few words about it."""
        ...


class Clock:
    """Derives the times of single passes from the running sums in `Statistics`."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._last = self._sums()

    def split(self) -> Times:
        """Return the time spent since the last call."""
        sums, last = self._sums(), self._last
        self._last = sums
        return Times(sums[0] - last[0], sums[1] - last[1], sums[2] - last[2])

    def _sums(self) -> tuple[float, float, float]:
        statistics = self._statistics
        return statistics.draft_s, statistics.target_s, statistics.host_s
