"""How a draft's time and what it is worth change with the size of the corpus.

Sizes up to that of the given corpus are made of its first documents. Larger ones are all of it, and
then synthetic documents, stitched together from spans of its own: these tell how time grows, since
there is ever more to look up and every match has ever more occurrences. They hold no new text, so
that tokens per step cannot be expected to grow with them. All indexes are built first, and then
recordings are replayed on each of them, in one process.
"""

import datetime as dt
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.console import Console

from benchmarks.comparison import circumstances
from benchmarks.index.growth_report import SYNTHETIC, as_markdown, write
from benchmarks.papers.longest_match import POINTER_BYTES
from benchmarks.stitching import Written, read_texts, write_corpus
from benchmarks.workloads import stdlib_corpus, stdlib_recordings
from indexer.errors import IndexerError
from indexer.reader import Index
from indexer.tokenizer import DEFAULT_MODEL
from retriever.commands.factories import OWN, DrafterFactory, find_factory
from retriever.drafter import TokenIds
from retriever.errors import RetrieverError
from retriever.plugins.replay.replay import ReplayReport, replay
from retriever.traces.traces import ChatEncoder, Trace, read_outputs, read_traces

RESULTS: Final = Path(__file__).parents[1] / "results" / "index"
SIZES: Final = (1_000_000, 10_000_000, 100_000_000)

_SAMPLE: Final = 500
"""Documents that are tokenised to estimate how many characters a token has."""

console = Console(stderr=True)


class BuildFailedError(RetrieverError):
    """An index could not be built."""


@dataclass(frozen=True, slots=True)
class Built:
    """An index and what it took.

    Attributes:
        path: of the index.
        corpus: what was indexed.
        report: what the build's command reports.
    """

    path: Path
    corpus: Written
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Corpora:
    """Makes corpora and indexes of any size.

    Attributes:
        texts: the documents that are given.
        characters_per_token: of these documents.
        tokenizer: what the indexer's command is told to use.
        folder: where everything is put.
        seed: of the synthetic documents.
    """

    texts: list[str]
    characters_per_token: float
    tokenizer: str
    folder: Path
    seed: int

    def build(self, num_tokens: int) -> Built:
        """Write a corpus of about so many tokens and index it in a child process.

        Raises:
            BuildFailedError: the child failed; it has said why on stderr.
        """
        console.print(f"making a corpus of some {num_tokens:,} tokens")
        source = self.folder / f"{num_tokens}.jsonl.gz"
        path = self.folder / f"{num_tokens}.index"
        num_characters = round(num_tokens * self.characters_per_token)
        written = write_corpus(source, self.texts, num_characters, self.seed)
        command = [sys.executable, "-m", "indexer", "build", str(source), "--output", str(path)]
        command += ["--tokenizer", self.tokenizer, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if done.returncode != 0:
            raise BuildFailedError(f"an index of {num_tokens:,} tokens could not be built")
        source.unlink()
        return Built(path, written, json.loads(done.stdout))


@dataclass(frozen=True, slots=True)
class Recordings:
    """What is replayed, and how.

    Attributes:
        traces: recorded outputs.
        outputs: int32[n] each, outputs that count as recent generations.
        budget: most nodes of each tree.
        drafters: to replay with: our own, and others to compare.
    """

    traces: list[Trace]
    outputs: list[TokenIds]
    budget: int
    drafters: Mapping[str, DrafterFactory]

    def as_json(self) -> dict[str, int]:
        """Return what a report says of them."""
        counts = {"traces": len(self.traces), "warm_outputs": len(self.outputs)}
        return {**counts, "budget": self.budget}

    def replay(self, index: Index) -> dict[str, ReplayReport]:
        """Replay all recordings with a new instance of each drafter."""
        reports = {}
        for name, factory in self.drafters.items():
            gc.collect()
            drafter = factory([index], self.outputs, self.budget)
            reports[name] = replay(drafter, self.traces, self.budget)
        return reports


def main(
    corpus: Annotated[
        Path | None,
        typer.Option(help="Documents, in JSON lines. Default: modules of the standard library."),
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(help="Recorded outputs to replay. Default: made of other such modules."),
    ] = None,
    warm: Annotated[
        Path | None, typer.Option(help="Outputs that count as recent generations.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="About so many tokens. Repeatable; default: 1M, 10M and 100M."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Another drafter to replay as well, such as rest. Repeatable."),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="Tokenizer of the corpus and the traces.")
    ] = DEFAULT_MODEL,
    budget: Annotated[int, typer.Option(min=1, help="Nodes in each tree.")] = 32,
    limit: Annotated[int, typer.Option(min=1, help="Replay only the first traces.")] = 30,
    repeats: Annotated[int, typer.Option(min=1, help="Of each index; the best counts.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the synthetic documents.")] = 0,
    machine: Annotated[
        str, typer.Option(help="What to call this machine.")
    ] = f"{platform.machine()}, {os.cpu_count()} cores",
    output: Annotated[
        Path | None, typer.Option(help="Where to write, without suffix. Default: by date.")
    ] = None,
) -> None:
    """Measure how drafts change as the corpus grows; write JSON and a table."""
    stem = output or RESULTS / f"{dt.datetime.now(dt.UTC).date()}-growth"
    try:
        encoder = ChatEncoder(tokenizer)
        drafters = {name: find_factory(name) for name in (OWN, *(against or ()))}
        recordings = Recordings(*_recorded(traces, warm, encoder, limit), budget, drafters)
        texts = read_texts(corpus) if corpus else [path.read_text() for path in stdlib_corpus()]
        with tempfile.TemporaryDirectory() as folder:
            density = characters_per_token(texts, encoder)
            corpora = Corpora(texts, density, tokenizer, Path(folder), seed)
            built = [corpora.build(size) for size in sorted(set(tokens or SIZES))]
            rows = measure(built, recordings, repeats)
        settings = {**circumstances(), "machine": machine, "repeats": repeats, "seed": seed}
        write(stem, {**settings, **recordings.as_json(), "synthetic": SYNTHETIC, "sizes": rows})
    except (RetrieverError, IndexerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(as_markdown(rows))


def _recorded(
    traces: Path | None, warm: Path | None, encoder: ChatEncoder, limit: int
) -> tuple[list[Trace], list[TokenIds]]:
    if traces is None:
        outputs, recorded = stdlib_recordings(encoder, limit)
        return recorded, outputs
    return list(read_traces(traces, encoder, limit)), (
        list(read_outputs(warm, encoder)) if warm else []
    )


def characters_per_token(texts: Sequence[str], encoder: ChatEncoder) -> float:
    """Estimate it from documents at even distances."""
    sample = texts[:: max(1, len(texts) // _SAMPLE)]
    num_tokens = sum(len(encoder.encode_output(text)) for text in sample)
    return sum(map(len, sample)) / max(1, num_tokens)


def measure(built: Sequence[Built], recordings: Recordings, repeats: int) -> list[dict[str, Any]]:
    """Replay on every index in turn, `repeats` times, and return a row of figures for each."""
    indexes = [Index.open(each.path) for each in built]
    console.print("warming up")
    recordings.replay(indexes[0])
    replays: list[list[dict[str, ReplayReport]]] = [[] for _ in built]
    for _ in range(repeats):
        for index, done in zip(indexes, replays, strict=True):
            done.append(recordings.replay(index))
            medians = (f"{name} {_median(report):.1f}" for name, report in done[-1].items())
            console.print(f"{index.num_tokens:,} tokens: {', '.join(medians)} \u00b5s")
    best = [
        {name: min((each[name] for each in done), key=_median) for name in recordings.drafters}
        for done in replays
    ]
    before = [None, *(_median(reports[OWN]) for reports in best)]
    rows = [*map(_row, built, indexes, best, before)]
    for index in indexes:
        index.close()
    return rows


def _median(report: ReplayReport) -> float:
    return float(np.median(report.draft_us or [0.0]))


def _row(
    built: Built, index: Index, reports: dict[str, ReplayReport], median_before: float | None
) -> dict[str, Any]:
    own, *others = (figures_of(report) for report in reports.values())
    num_tokens, separators = max(1, index.num_tokens), index.num_documents
    token_bytes = index.segments[0].tokens.itemsize
    p50 = own["draft_us"]["p50"]
    return {
        "tokens": index.num_tokens,
        "segments": len(index.segments),
        **asdict(built.corpus),
        "bytes_per_token": index.num_bytes / num_tokens,
        "bytes_per_token_without_phrases": (index.num_bytes - index.phrases.num_bytes) / num_tokens,
        "bytes_per_token_infini_gram": POINTER_BYTES + token_bytes * (1 + separators / num_tokens),
        "build": built.report,
        **own,
        "p50_to_size_before": p50 / median_before if median_before else None,
        "against": dict(zip([*reports][1:], others, strict=True)),
    }


def figures_of(report: ReplayReport) -> dict[str, Any]:
    """Return tokens per step, and microseconds of drafts."""
    p50, p90, p99 = np.percentile(report.draft_us or [0.0], (50, 90, 99)).tolist()
    return {
        "tokens_per_step": report.tokens / max(1, report.steps),
        "draft_us": {"p50": p50, "p90": p90, "p99": p99},
    }


if __name__ == "__main__":
    typer.run(main)
