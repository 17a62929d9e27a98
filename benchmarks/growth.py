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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.console import Console

from benchmarks.report import circumstances
from benchmarks.stitching import Written, read_texts, write_corpus
from indexer.errors import IndexerError
from indexer.reader import Index
from indexer.tokenizer import DEFAULT_MODEL
from retriever.drafter import TokenIds
from retriever.encoding import ChatEncoder
from retriever.errors import RetrieverError
from retriever.factories import own_drafter
from retriever.replay import ReplayReport, replay
from retriever.traces import Trace, read_outputs, read_traces

RESULTS: Final = Path(__file__).parent / "results"
SIZES: Final = (1_000_000, 10_000_000, 100_000_000)

SYNTHETIC: Final = (
    "Synthetic: the share of text that was stitched together from random spans of 20 to 60 words "
    "of the given documents."
)
_HEADER: Final = (
    "| tokens | synthetic | segments | bytes per token | build, s | tokens per step "
    "| draft, \u00b5s: p50 | p90 | p99 | p50 to the size before |"
)
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
        seconds: that the build took, as its command reports.
    """

    path: Path
    corpus: Written
    seconds: float


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
        return Built(path, written, json.loads(done.stdout)["seconds"])


@dataclass(frozen=True, slots=True)
class Recordings:
    """What is replayed, and how.

    Attributes:
        traces: recorded outputs.
        outputs: int32[n] each, outputs that count as recent generations.
        budget: most nodes of each tree.
    """

    traces: list[Trace]
    outputs: list[TokenIds]
    budget: int

    def as_json(self) -> dict[str, int]:
        """Return what a report says of them."""
        counts = {"traces": len(self.traces), "warm_outputs": len(self.outputs)}
        return {**counts, "budget": self.budget}

    def replay(self, index: Index) -> ReplayReport:
        """Replay all with a drafter that begins anew."""
        gc.collect()
        drafter = own_drafter([index], self.outputs, self.budget)
        return replay(drafter, self.traces, self.budget)


def main(
    corpus: Annotated[Path, typer.Option(help="Documents, in JSON lines.")],
    traces: Annotated[Path, typer.Option(help="Recorded outputs to replay.")],
    warm: Annotated[
        Path | None, typer.Option(help="Outputs that count as recent generations.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="About so many tokens. Repeatable; default: 1M, 10M and 100M."),
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
        outputs = list(read_outputs(warm, encoder)) if warm else []
        recordings = Recordings(list(read_traces(traces, encoder, limit)), outputs, budget)
        texts = read_texts(corpus)
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
    replays: list[list[ReplayReport]] = [[] for _ in built]
    for _ in range(repeats):
        for index, done in zip(indexes, replays, strict=True):
            done.append(recordings.replay(index))
            console.print(f"{index.num_tokens:,} tokens: {_median(done[-1]):.1f} \u00b5s")
    best = [min(done, key=_median) for done in replays]
    before = [None, *map(_median, best)]
    rows = [*map(_row, built, indexes, best, before)]
    for index in indexes:
        index.close()
    return rows


def _median(report: ReplayReport) -> float:
    return float(np.median(report.draft_us or [0.0]))


def _row(
    built: Built, index: Index, report: ReplayReport, median_before: float | None
) -> dict[str, Any]:
    p50, p90, p99 = np.percentile(report.draft_us or [0.0], (50, 90, 99)).tolist()
    return {
        "tokens": index.num_tokens,
        "segments": len(index.segments),
        **asdict(built.corpus),
        "bytes_per_token": index.num_bytes / max(1, index.num_tokens),
        "build_seconds": built.seconds,
        "tokens_per_step": report.tokens / max(1, report.steps),
        "draft_us": {"p50": p50, "p90": p90, "p99": p99},
        "p50_to_size_before": p50 / median_before if median_before else None,
    }


def write(stem: Path, report: dict[str, Any]) -> None:
    """Write `stem` with `.json` and `.md`."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_name(f"{stem.name}.md").write_text(as_markdown(report["sizes"]))


def as_markdown(rows: Iterable[dict[str, Any]]) -> str:
    """Return the table for people."""
    lines = [_HEADER, "|---" * 10 + "|"]
    for row in rows:
        times = " | ".join(f"{time:.1f}" for time in row["draft_us"].values())
        ratio = row["p50_to_size_before"]
        lines.append(
            f"| {row['tokens']:,} | {row['synthetic_share']:.0%} | {row['segments']} "
            f"| {row['bytes_per_token']:.2f} | {row['build_seconds']:.1f} "
            f"| {row['tokens_per_step']:.3f} | {times} | {f'{ratio:.2f}' if ratio else ''} |"
        )
    return "\n".join([*lines, "", SYNTHETIC]) + "\n"


if __name__ == "__main__":
    typer.run(main)
