"""An index of a billion tokens, watched: `make bench-scale`.

    python -m benchmarks.index.scale --folder DIRECTORY --tokens 1000000000 --memory 4G

Text of the machine, and beyond it text made from it (`benchmarks.index.scale_text`), is written as
JSON lines. From one document in so many an index of ten million tokens is built, from all of them
the large one, in a process tree whose memory and disk are sampled; it is killed once in a stated
stage and begun again. Then held-out documents are replayed on both indexes, cold and warm, and the
large one is added to and compacted, watched as well.

Each step is written down as it ends: a command that was interrupted goes on behind the last one.
"""

import datetime as dt
import json
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.comparison import circumstances
from benchmarks.index.cold_drafts import cold_drafts, files_of
from benchmarks.index.growth import RESULTS, Recordings, characters_per_token, figures_of
from benchmarks.index.process_tree import TreeMemory, Watched, watched
from benchmarks.index.scale_report import as_markdown, judged
from benchmarks.index.scale_text import (
    Corpus,
    Shard,
    TextFile,
    TextWriter,
    distinct_shares,
    made_sample,
    real_documents,
    up_to,
    write_made,
    write_real,
)
from indexer.errors import IndexerError
from indexer.format.names import MAX_POSITIONS, SCRATCH_FOLDER
from indexer.reader import Index
from indexer.stages.gathering import COUNTING, READING, SORTING
from indexer.tokenizer import DEFAULT_MODEL
from retriever.commands.factories import OWN, find_factory
from retriever.errors import RetrieverError
from retriever.traces.traces import ChatEncoder, Trace

STAGES: Final = (READING, SORTING, COUNTING)
NEVER: Final = "never"

SMALL_TOKENS: Final = 10_000_000
ADDED_SHARE: Final = 0.01
"""Of the large corpus, text that is added to its index: an eighth more would have all n-grams
counted again, which `compact` does in any case."""

SEGMENT_TOKENS: Final = 340_000_000
"""Of which three are a billion, and sorting one takes 3.4 GB."""

OTHER: Final = "starting or ending"

_FIRST: Final = 300
_SAMPLED: Final = 1500
"""Documents that are tokenised to estimate how many characters a token has: the first ones, and
then so many of all, which takes half a minute and is off by one in a hundred."""

_PROMPT_TOKENS: Final = 1024
_OUTPUT_TOKENS: Final = 400
_COLD_TRACES: Final = 20
_COLD_TOKENS: Final = 64
_NOT_KEPT: Final = frozenset({"output", "path", "skipped_places", "conversations"})
"""Of what the indexer reports: places on the machine."""

_TELL_EVERY_S: Final = 10.0
_MIB: Final = 1 << 20

console = Console(stderr=True, soft_wrap=True)


class ScaleError(RetrieverError):
    """A step of the benchmark failed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        folder: where all is put, and found again by a command that goes on.
        text: folders and files of real text.
        tokens: of the large index, about.
        small_tokens: of the small one, about.
        real_share: the most of the large one that is real text.
        tokenizer: of the indexes.
        memory: as the builder is told it.
        segment_tokens: as the builder is told it.
        workers: as the builder is told it.
        kill: the stage in which the large build is killed, or `NEVER`.
        kill_after_s: how long that stage has lasted then.
        join_memory: in which the large index is made one segment in the end; empty to leave it.
        seed: of the text that is made.
        limit: of held-out documents that are replayed.
        budget: most nodes of each tree.
    """

    folder: Path
    text: tuple[Path, ...]
    tokens: int
    small_tokens: int
    real_share: float
    tokenizer: str
    memory: str
    segment_tokens: int
    workers: int
    kill: str
    kill_after_s: float
    join_memory: str
    seed: int
    limit: int
    budget: int

    def to_json(self) -> dict[str, Any]:
        """Return the settings for machines to read; places on the machine are left out."""
        names = ["tokens", "small_tokens", "real_share", "tokenizer", "memory", "segment_tokens"]
        names += ["workers", "kill", "kill_after_s", "join_memory", "seed", "limit", "budget"]
        return {name: getattr(self, name) for name in names}


class Steps:
    """What has been measured so far, on disk: each step once.

    Args:
        plan: all steps must be of this one.
        stem: where the report is written after each step.

    Raises:
        ScaleError: the folder holds steps of another plan.
    """

    def __init__(self, plan: Plan, stem: Path) -> None:
        plan.folder.mkdir(parents=True, exist_ok=True)
        self._path, self._stem = plan.folder / "steps.json", stem
        self._texts = [str(path) for path in plan.text]
        self.done: dict[str, Any] = {"plan": plan.to_json(), **circumstances()}
        if self._path.exists():
            found = json.loads(self._path.read_text())
            if (found["plan"], found.pop("texts")) != (plan.to_json(), self._texts):
                raise ScaleError(
                    f"{plan.folder} holds another run: name another --folder, or remove it"
                )
            self.done = found

    def run(self, name: str, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what a step found: from disk, or by running it now."""
        if name in self.done:
            console.print(f"{name}: done before")
        else:
            console.print(f"{name}: {dt.datetime.now(dt.UTC):%H:%M:%S}")
            found_now = step()
            self.done.pop(f"{name}_runs", None)
            self.keep(name, found_now)
        found: dict[str, Any] = self.done[name]
        return found

    def report(self) -> dict[str, Any]:
        """Return the report of what is done."""
        return {"gates": judged(self.done), **self.done}

    def keep(self, name: str, found: Any) -> None:
        """Write down what a step found, or has found so far, and the report."""
        self.done[name] = found
        content = json.dumps({**self.done, "texts": self._texts}, indent=1)
        part = self._path.with_suffix(".part")
        part.write_text(content + "\n")
        part.rename(self._path)
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        report, name = self.report(), self._stem.name
        self._stem.with_name(f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        self._stem.with_name(f"{name}.md").write_text(as_markdown(report))


_SAMPLE_CHARACTERS: Final = 4 << 20
_ORDERS: Final = (1, 2, 4, 8, 16)
_MORE: Final = 1.01
"""Of text than is estimated: the index is to have as many tokens as are asked for."""


def prepared(plan: Plan, encoder: ChatEncoder) -> Corpus:
    """Write the corpus, or what is missing of it."""
    writer = TextWriter(plan.folder / "text")
    wanted = plan.tokens * _MORE
    density = characters_per_token([*islice(real_documents(plan.text), _FIRST)], encoder)
    *real, held_out = write_real(plan.text, writer, round(plan.real_share * wanted * density))
    step = max(1, sum(file.documents for file in real) // _SAMPLED)
    sample = [text for file in real for text in islice(file.texts(), 0, None, step)]
    real_density = _characters_per_token(sample, encoder)
    made_density = _characters_per_token(made_sample(sample, plan.seed), encoder)
    console.print(f"  text: {len(real)} files of real documents", highlight=False)
    left = wanted - sum(file.characters for file in real) / real_density
    made = []
    for file in write_made(real, writer, round(max(left, 0) * made_density), plan.seed):
        made.append(file)
        written = sum(file.characters for file in (*real, *made))
        console.print(f"  text: {written / _MIB:,.0f} million characters", highlight=False)
    others = writer.below("added")
    added = round(ADDED_SHARE * plan.tokens * made_density)
    return Corpus(
        (*real, *made), tuple(write_made(real[:1], others, added, plan.seed + 1)), held_out
    )


def _characters_per_token(texts: Sequence[str], encoder: ChatEncoder) -> float:
    return sum(map(len, texts)) / max(1, sum(len(encoder.encode_output(text)) for text in texts))


def describe(corpus: Corpus, plan: Plan, encoder: ChatEncoder) -> dict[str, Any]:
    """Return what is to be said of a corpus."""
    return {
        "made_share": round(corpus.made_share, 4),
        "documents": sum(file.documents for file in corpus.files),
        "characters": sum(file.characters for file in corpus.files),
        "real_characters": sum(file.characters for file in corpus.files if not file.is_made),
        "distinct_ngram_shares": likeness(corpus.files[0], encoder, plan.seed),
    }


def likeness(real: TextFile, encoder: ChatEncoder, seed: int) -> dict[str, dict[int, float]]:
    """Return the shares of distinct n-grams in real text, and in as much that was made.

    The real text is two halves; what was made is the first half, twice rewritten.
    """
    documents = [*up_to(real.texts(), _SAMPLE_CHARACTERS)]
    shard = Shard.of(documents[: len(documents) // 2])
    twice = [text for turn in range(2) for text in shard.made((seed, turn))]
    return {
        name: {order: round(share, 4) for order, share in distinct_shares(ids, _ORDERS).items()}
        for name, ids in (("real", _ids(documents, encoder)), ("made", _ids(twice, encoder)))
    }


def _ids(texts: Sequence[str], encoder: ChatEncoder) -> NDArray[np.int64]:
    return np.concatenate([np.array(encoder.encode_output(text), np.int64) for text in texts])


def recordings_of(held_out: TextFile, plan: Plan, encoder: ChatEncoder) -> list[Trace]:
    """Return held-out documents as recordings: the first half is the prompt, the rest the output.

    Prompts are cut to their last 1,024 tokens, outputs to their first 400.

    Raises:
        ScaleError: no document is long enough.
    """
    traces = []
    for text in held_out.texts():
        lines = text.splitlines(keepends=True)
        halves = "".join(lines[: len(lines) // 2]), "".join(lines[len(lines) // 2 :])
        prompt, output = (np.array(encoder.encode_output(half), np.int32) for half in halves)
        if len(prompt) and len(output) >= _OUTPUT_TOKENS:
            traces.append(Trace(prompt[-_PROMPT_TOKENS:], output[:_OUTPUT_TOKENS]))
    if not traces:
        raise ScaleError("no document that was held out has 400 tokens: name more --text")
    return traces[:: max(1, len(traces) // plan.limit)][: plan.limit]


class Builder:
    """Runs the indexer's commands, watched.

    Args:
        plan: what to tell it.
        steps: where runs are written down while they go on.
    """

    def __init__(self, plan: Plan, steps: Steps) -> None:
        self._plan, self._steps = plan, steps
        self._folder = plan.folder / "indexes"
        self._folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Return where an index is."""
        return self._folder / f"{name}.index"

    def build(self, name: str, sources: Sequence[Path], *, kill: str = NEVER) -> dict[str, Any]:
        """Build an index; kill the builder once in a stage, if asked for, and begin it again."""
        path, noted = self.path(name), f"{name}_runs"
        command = ["build", *map(str, sources), "--output", str(path), "--overwrite", "--resume"]
        command += ["--tokenizer", self._plan.tokenizer, *self._work()]
        runs = self._steps.done.get(noted, [])
        if not runs:
            self._remove_leftovers(path)
        if kill != NEVER and not any("killed_in" in run for run in runs):
            killed = self._watch(command, path, kill, noted, runs)
            if not killed.killed_in:
                raise ScaleError(f"the build of {name} was not killed: {kill} was over too soon")
            runs = [*runs, killed.to_json()]
            self._steps.keep(noted, runs)
        done = self._finished(self._watch(command, path, NEVER, noted, runs), runs)
        return {**done, "bytes_on_disk": sum(f.stat().st_size for f in files_of(path))}

    def change(self, verb: str, name: str, *sources: Path) -> dict[str, Any]:
        """Add sources to an index, or compact it."""
        path = self.path(name)
        command = [verb, str(path), *map(str, sources), *self._work()]
        return self._finished(self._watch(command, path), [])

    def join(self, name: str, memory: str) -> dict[str, Any]:
        """Compact an index into one segment within another limit of memory."""
        path = self.path(name)
        work = ["--memory", memory, "--segment-tokens", str(MAX_POSITIONS)]
        return self._finished(self._watch(["compact", str(path), *work], path), [])

    def verify(self, name: str) -> dict[str, Any]:
        """Check every byte of an index."""
        path = self.path(name)
        return self._finished(self._watch(["verify", str(path)], path), [])

    def _remove_leftovers(self, path: Path) -> None:
        """Remove what a build left of which no run was written down: its time would be missing."""
        for place in path.parent.glob(f".{path.name}.*"):
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink()

    def _work(self) -> list[str]:
        plan = self._plan
        limits = ["--memory", plan.memory, "--workers", str(plan.workers)]
        return [*limits, "--segment-tokens", str(plan.segment_tokens)]

    def _watch(
        self,
        command: Sequence[str],
        path: Path,
        kill: str = NEVER,
        noted: str = "",
        runs: Sequence[dict[str, Any]] = (),
    ) -> Watched:
        """Run a command; every few seconds, note what was sampled so far behind earlier runs."""
        told = 0.0

        def tell(run: Watched, stage: str, memory: TreeMemory, disk: int) -> None:
            nonlocal told
            if time.monotonic() - told < _TELL_EVERY_S:
                return
            told = time.monotonic()
            sizes = f"{memory.own / _MIB:,.0f} MiB of memory, {disk / _MIB:,.0f} MiB on disk"
            console.print(f"  {run.seconds:,.0f} s, {stage}: {sizes}", highlight=False)
            if noted:
                self._steps.keep(noted, [*runs, {**run.to_json(), "interrupted": True}])

        return watched(
            [sys.executable, "-m", "indexer", *command, "--json"],
            self._folder,
            lambda: stage_of(path),
            tell,
            lambda stage, seconds: stage == kill and seconds >= self._plan.kill_after_s,
        )

    def _finished(self, run: Watched, before: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if run.status != 0:
            raise ScaleError("the indexer failed: it has said why above")
        report = json.loads(run.output)
        kept = {name: value for name, value in report.items() if name not in _NOT_KEPT}
        return {"runs": [*before, run.to_json()], "report": kept}


def stage_of(index: Path) -> str:
    """Name the stage that the writer of an index is in, by what is in its scratch folder."""
    hidden = index.parent.glob(f".{index.name}.partial-*")
    for folder in (*hidden, index):
        scratch = folder / SCRATCH_FOLDER
        found = {path.name.partition("-")[0] for path in _listed(scratch)}
        for stage in reversed(STAGES):
            if stage in found:
                return stage
    return OTHER


def _listed(folder: Path) -> list[Path]:
    try:
        return [*folder.iterdir()]
    except OSError:
        return []


def drafts_on(names: Sequence[str], builder: Builder, recordings: Recordings) -> dict[str, Any]:
    """Return figures of drafts on some indexes: cold first, then warm, replayed in turns."""
    cold_traces = [Trace(trace.prompt, trace.output[:_COLD_TOKENS]) for trace in recordings.traces][
        :_COLD_TRACES
    ]
    found: dict[str, Any] = {"traces": len(recordings.traces), "budget": recordings.budget}
    for name in names:
        cold = cold_drafts(builder.path(name), cold_traces, recordings.budget)
        found[name] = {"cold": cold.to_json()}
    for name, warm in warm_drafts(names, builder, recordings).items():
        found[name]["warm"] = warm
    return found


def held_drafts(names: Sequence[str], builder: Builder, recordings: Recordings) -> dict[str, Any]:
    """Return figures of drafts on some indexes that are held in memory instead of mapped."""
    warm = warm_drafts(names, builder, recordings, hold=True)
    return {name: {"warm": figures} for name, figures in warm.items()}


def warm_drafts(
    names: Sequence[str],
    builder: Builder,
    recordings: Recordings,
    *,
    repeats: int = 3,
    hold: bool = False,
) -> dict[str, Any]:
    """Replay on each index in turns, after once unmeasured; return the replay of best median."""
    indexes = {name: Index.open(builder.path(name), hold=hold) for name in names}
    best: dict[str, Any] = {}
    for turn in range(repeats + 1):
        for name, index in indexes.items():
            figures = figures_of(recordings.replay(index)[OWN])
            median = figures["draft_us"]["p50"]
            console.print(f"  drafts, {name}: {median:.1f} µs", highlight=False)
            before = best.get(name)
            if turn and (before is None or median < before["draft_us"]["p50"]):
                best[name] = {"segments": len(index.segments), "tokens": index.num_tokens} | figures
    for index in indexes.values():
        index.close()
    return best


def run(plan: Plan, stem: Path) -> dict[str, Any]:
    """Measure all that has not been measured yet; return the report."""
    steps = Steps(plan, stem)
    encoder, builder = ChatEncoder(plan.tokenizer), Builder(plan, steps)
    corpus: Corpus | None = None

    def text() -> Corpus:
        nonlocal corpus
        corpus = corpus or prepared(plan, encoder)
        return corpus

    def recordings() -> Recordings:
        traces = recordings_of(text().held_out, plan, encoder)
        return Recordings(traces, [], plan.budget, {OWN: find_factory(OWN)})

    def drafts(*names: str) -> dict[str, Any]:
        return drafts_on(names, builder, recordings())

    def small(name: str, *, real_only: bool) -> dict[str, Any]:
        return builder.build(name, [small_text(text(), plan, name, real_only=real_only)])

    def large() -> dict[str, Any]:
        return builder.build("large", [file.path for file in text().files], kill=plan.kill)

    steps.run("text", lambda: describe(text(), plan, encoder))
    steps.run("small", lambda: small("small", real_only=False))
    steps.run("real", lambda: small("real", real_only=True))
    steps.run("large", large)
    steps.run("drafts", lambda: drafts("small", "real", "large"))
    added = [file.path for file in text().added]
    steps.run("add", lambda: builder.change("add", "large", *added))
    steps.run("drafts_added", lambda: drafts("large"))
    steps.run("compact", lambda: builder.change("compact", "large"))
    steps.run("drafts_compacted", lambda: drafts("large"))
    steps.run("verify", lambda: builder.verify("large"))
    if plan.join_memory:
        steps.run("join", lambda: builder.join("large", plan.join_memory))
        steps.run("drafts_joined", lambda: drafts("small", "large"))
        steps.run("drafts_held", lambda: held_drafts(("small", "large"), builder, recordings()))
    return steps.report()


def small_text(corpus: Corpus, plan: Plan, name: str, *, real_only: bool) -> Path:
    """Write the text of a small index: one document in so many of the large one's, or real ones."""
    files = [file for file in corpus.files if not (real_only and file.is_made)]
    characters = sum(file.characters for file in corpus.files)
    wanted = characters * plan.small_tokens / plan.tokens
    step = max(1, round(sum(file.characters for file in files) / wanted))
    writer = TextWriter(plan.folder / "text" / name)
    texts = corpus.every(step, real_only=real_only)
    return writer.write(f"{name}.jsonl", texts, is_made=False).path


def main(  # noqa: PLR0913, PLR0917  (options of a command)
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder or file of real text: sources, documentation, unpacked packages. "
            "Repeatable; default: the running interpreter's libraries."
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Where text and indexes go, and what is done is found again.")
    ] = Path("build/scale"),
    tokens: Annotated[int, typer.Option(min=1000, help="Of the large index.")] = 1_000_000_000,
    small_tokens: Annotated[
        int | None, typer.Option(min=100, help="Of the small one. Default: 10M, or a tenth.")
    ] = None,
    real_share: Annotated[
        float,
        typer.Option(
            min=0.001, max=1, help="At most this share is real text, as it is in a larger one."
        ),
    ] = 1.0,
    tokenizer: Annotated[str, typer.Option(help="Of the indexes.")] = DEFAULT_MODEL,
    memory: Annotated[str, typer.Option(help="What the builder may take.")] = "4G",
    segment_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a segment, as the builder is told.")
    ] = SEGMENT_TOKENS,
    workers: Annotated[int, typer.Option(min=1, help="Of the builder.")] = 2,
    kill: Annotated[
        str, typer.Option(help=f"Stage to kill the build in: {', '.join(STAGES)} or {NEVER}.")
    ] = "sorting",
    kill_after: Annotated[
        float, typer.Option(min=0, help="Seconds that the stage has lasted when it is killed.")
    ] = 0.3,
    join: Annotated[
        str,
        typer.Option(
            help="In the end, compact the large index into one segment, too, within this memory, "
            "such as 12G for a billion tokens, and draft from it."
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of made text.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="Held-out documents to replay.")] = 60,
    budget: Annotated[int, typer.Option(min=1, help="Nodes in each tree.")] = 32,
    output: Annotated[
        Path | None, typer.Option(help="Where to write, without suffix. Default: by date.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False,
) -> None:
    """Build an index of a billion tokens under the eyes of a watch; write JSON and a report.

    An interrupted command goes on behind the last step that it has finished.
    """
    if kill not in {*STAGES, NEVER}:
        raise typer.BadParameter(f"name one of {', '.join(STAGES)}, {NEVER}", param_hint="--kill")
    places = text or [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    small = small_tokens or min(SMALL_TOKENS, tokens // 10)
    plan = Plan(
        folder.resolve(),
        tuple(path.resolve() for path in places),
        tokens,
        small,
        real_share,
        tokenizer,
        memory,
        segment_tokens,
        workers,
        kill,
        kill_after,
        join,
        seed,
        limit,
        budget,
    )
    stem = output or RESULTS / f"{dt.datetime.now(dt.UTC).date()}-scale"
    try:
        report = run(plan, stem)
    except (RetrieverError, IndexerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(json.dumps(report) if as_json else as_markdown(report))


if __name__ == "__main__":
    typer.run(main)
