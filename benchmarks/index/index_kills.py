"""Kills builders and writers of an index, again and again, and checks the index afterwards.

    python benchmarks/index/index_kills.py --rounds 1500 --json

A child builds, adds, removes or compacts, and is killed (SIGKILL): half of them after a random
time, half by their own hand before a random change to the file system, of each kind as often as of
any other, so that kills fall into moments that take no time, too. Then the index must be one of
two: what it was before, or what the change was to make of it; whole, by `verify`; and the next
writer must find the lock free and remove what the killed one left.
"""

import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from indexer.build import BuildOptions, build_index
from indexer.change.changes import add_documents, compact, remove_documents
from indexer.change.verifying import verify_index
from indexer.change.writer import writing
from indexer.errors import IndexerError, IndexNotFoundError
from indexer.format.output import new_index_folder
from indexer.reader import Index

Documents = dict[str, list[int]]
"""Token ids by name."""

_NUM_WORDS: Final = 500
_MAX_DOCUMENT_TOKENS: Final = 3000
_MAX_DOCUMENTS: Final = 24
_FIRST_GUESS_S: Final = 0.2
_NEVER: Final = ("", 0)
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_REMOVALS: Final = frozenset({"os.remove", "os.rmdir", "shutil.rmtree"})
_CHANGES: Final = frozenset({"os.mkdir", "os.rename", *_REMOVALS})
_PLACES: Final = {
    "catalog": "publishing",
    ".scratch": "reading and sorting",
    "phrases": "counting phrases",
    "segments": "moving segments",
    "writer.lock": "locking",
}


@dataclass(slots=True)
class Counts:
    """What the kills came to.

    Attributes:
        killed: processes killed, by what they did.
        finished: processes that were done before they would have been killed.
        moments: what those that were killed had begun last.
        published: kills after which the index was the new one.
        leftovers: kills that left files, which is no fault.
        unreadable: indexes that could not be opened.
        mixed: indexes that were neither the old one nor the new one.
        unsound: indexes in which `verify` found something.
        stuck: next writers that were refused, or that left something of the killed one.
    """

    killed: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    moments: Counter[str] = field(default_factory=Counter)
    published: int = 0
    leftovers: int = 0
    unreadable: int = 0
    mixed: int = 0
    unsound: int = 0
    stuck: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether every index was whole and one of the two."""
        return self.unreadable == self.mixed == self.unsound == self.stuck == 0

    def to_json(self) -> dict[str, Any]:
        """Return the counts for machines to read."""
        return {
            "killed": dict(sorted(self.killed.items())),
            "finished": self.finished,
            "moments": dict(sorted(self.moments.items())),
            "published": self.published,
            "leftovers": self.leftovers,
            "unreadable": self.unreadable,
            "mixed": self.mixed,
            "unsound": self.unsound,
            "stuck": self.stuck,
        }


@dataclass(frozen=True, slots=True)
class Change:
    """A change that may be killed.

    Attributes:
        verb: what it does.
        run: does it.
        after: what the index holds then.
    """

    verb: str
    run: Callable[[], object]
    after: Documents


class World:
    """An index, the documents that it must hold, and sources to add."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.path = folder / "index"
        self.before: Documents = {}
        self._sources = folder / "sources"
        self._sources.mkdir()
        self._random = random.Random(seed)  # noqa: S311  (reproducible, not secret)
        self._num_sources = 0
        self._tokenizer = word_tokenizer()

    def next_change(self) -> Change:
        """Choose what to do next."""
        verbs = ["add", "add", "remove", "compact", "build"]
        verb = self._random.choice(verbs) if self.before else "build"
        if verb == "add" and len(self.before) > _MAX_DOCUMENTS:
            verb = "remove"
        if verb == "build":
            return self._build()
        if verb == "add":
            return self._add()
        if verb == "remove" and len(self.before) > 1:
            return self._remove()
        return Change("compact", lambda: compact(self.path), self.before)

    def _options(self) -> BuildOptions:
        return BuildOptions(
            segment_tokens=self._random.choice([2000, 5000, 10**6]),
            overwrite=True,
            keep_texts=self._random.random() < 0.5,  # noqa: PLR2004
        )

    def _build(self) -> Change:
        paths, documents = self._write_sources(6)
        options = self._options()
        return Change(
            "build", lambda: build_index(paths, self.path, self._tokenizer, options), documents
        )

    def _add(self) -> Change:
        paths, documents = self._write_sources(4)
        options = self._options()
        return Change(
            "add",
            lambda: add_documents(self.path, [*paths, *self.before], options),
            {**self.before, **documents},
        )

    def _remove(self) -> Change:
        num_removed = self._random.randint(1, min(8, len(self.before) - 1))
        gone = self._random.sample(sorted(self.before), num_removed)
        after = {name: ids for name, ids in self.before.items() if name not in gone}
        return Change("remove", lambda: remove_documents(self.path, gone), after)

    def _write_sources(self, most: int) -> tuple[list[Path], Documents]:
        documents = {}
        for _ in range(self._random.randint(1, most)):
            ids = [self._num_sources % _NUM_WORDS, self._num_sources // _NUM_WORDS]
            length = self._random.randrange(_MAX_DOCUMENT_TOKENS)
            ids += self._random.choices(range(_NUM_WORDS), k=length)
            path = self._sources / f"{self._num_sources:06d}.txt"
            path.write_text(" ".join(map(str, ids)))
            documents[str(path)] = ids
            self._num_sources += 1
        return [Path(name) for name in documents], documents


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of which a number is the word for the token of this id."""
    core = Tokenizer(models.WordLevel({str(word): word for word in range(_NUM_WORDS)}, "0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]


def documents_in(path: Path) -> Documents:
    """Return what an index holds; nothing where there is none."""
    found = {}
    try:
        with Index.open(path) as index:
            documents = index.documents()
            for segment in index.segments:
                for number in range(len(segment.documents)):
                    document, num_tokens = next(documents)
                    begin = int(segment.documents.starts[number])
                    found[document.name] = segment.tokens[begin : begin + num_tokens].tolist()
    except IndexNotFoundError:
        return {}
    return found


class Killer:
    """Runs changes in processes of their own, and kills them at moments that cover all."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  (reproducible, not secret)
        self._seconds: dict[str, float] = {}
        self._moments: dict[str, Counter[str]] = {}

    def run(self, change: Change, index: Path) -> tuple[bool, str]:
        """Run a change; return whether it was killed, and what it had begun last."""
        seconds = self._seconds.get(change.verb, _FIRST_GUESS_S)
        seen = self._moments.setdefault(change.verb, Counter())
        by_time = not seen or self._random.random() < 0.5  # noqa: PLR2004
        last = _NEVER
        if not by_time:
            moment = self._random.choice(sorted(seen))
            last = (moment, self._random.randint(1, seen[moment]))
        reading, writing_end = os.pipe()
        began = time.perf_counter()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _live(change, index, writing_end, last)
        os.close(writing_end)
        if by_time:
            time.sleep(self._random.uniform(0, 1.1 * seconds))
            os.kill(child, signal.SIGKILL)
        events = _read_lines(reading)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                raise RuntimeError(f"{change.verb} failed")
            took = time.perf_counter() - began
            self._seconds[change.verb] = 0.5 * (self._seconds.get(change.verb, took) + took)
        seen |= Counter(events)
        return os.WIFSIGNALED(status), events[-1] if events else "starting"


def _live(change: Change, index: Path, pipe: int, last: tuple[str, int]) -> None:
    """Make a change in a child, telling of each step; die before the one of a kind and number."""
    num_steps: Counter[str] = Counter()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        moment = _moment(index, event, arguments)
        if moment is not None:
            num_steps[moment] += 1
            os.write(pipe, moment.encode() + b"\n")
            if (moment, num_steps[moment]) == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    status = 1
    try:
        change.run()
        status = 0
    finally:
        os._exit(status)


def _moment(index: Path, event: str, arguments: tuple[Any, ...]) -> str | None:
    """Say what a process is about when it changes something; None if it does not."""
    changes = event in _CHANGES or (event == "open" and (arguments[2] or 0) & _WRITING)
    place = arguments[event == "os.rename"] if changes else None
    if not isinstance(place, str | os.PathLike):
        return None
    first, *parts = Path(place).parts[len(index.parts) - 1 :] or ("",)
    if ".lock-" in first:
        return "locking"
    if event in _REMOVALS and ".scratch" not in parts:
        return "collecting garbage"
    if not parts:
        return "publishing" if event == "os.rename" and first == index.name else None
    return _PLACES.get(parts[0], "storing the tokenizer")


def _read_lines(pipe: int) -> list[str]:
    with os.fdopen(pipe, "r", encoding="utf-8") as stream:
        return stream.read().splitlines()


def check(world: World, change: Change, counts: Counts) -> None:
    """Look at what a killed process left, have the next writer clean up, and look again."""
    try:
        found = documents_in(world.path)
    except IndexerError as error:
        counts.unreadable += 1
        print(f"{change.verb}: {error}", file=sys.stderr)
        return
    if found not in (world.before, change.after):
        counts.mixed += 1
    counts.published += found == change.after != world.before
    if found and verify_index(world.path).findings:
        counts.unsound += 1
    counts.leftovers += bool(leftovers(world.path))
    counts.stuck += not clean_up(world.path)
    if documents_in(world.path) != found:
        counts.mixed += 1
    world.before = found


def clean_up(path: Path) -> bool:
    """Be the next writer, and the next build; tell whether nothing is left of those before."""
    try:
        if path.exists():
            with writing(path, "check"):
                pass
        with suppress(_NeverMindError), new_index_folder(path, overwrite=True):
            raise _NeverMindError
    except IndexerError as error:
        print(error, file=sys.stderr)
        return False
    return not leftovers(path)


class _NeverMindError(Exception):
    """Ends a build that only cleans up."""


def leftovers(path: Path) -> list[str]:
    """Return the files in an index's folder, and next to it, that the latest snapshot lacks."""
    left = [place.name for place in path.parent.glob(f".{path.name}.*")]
    if not path.exists():
        return left
    with Index.open(path) as index:
        live = {segment.name for segment in index.segments}
        latest = f"{index.number:08d}"
    left += [place.name for place in path.glob(".scratch/*")]
    left += [place.name for place in (path / "catalog").iterdir() if place.name != latest]
    left += [place.name for place in (path / "segments").iterdir() if place.name not in live]
    return left + [place.name for place in list((path / "phrases").iterdir())[1:]]


def run_rounds(folder: Path, rounds: int, seed: int) -> Counts:
    """Change and kill so many times."""
    world, killer, counts = World(folder, seed), Killer(seed), Counts()
    for _ in range(rounds):
        change = world.next_change()
        is_killed, moment = killer.run(change, world.path)
        if is_killed:
            counts.killed[change.verb] += 1
            counts.moments[moment] += 1
        else:
            counts.finished += 1
            counts.mixed += documents_in(world.path) != change.after
        check(world, change, counts)
    return counts


def run(
    rounds: Annotated[int, typer.Option(min=1, help="How many processes to start.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the changes and of the moments of kills.")] = 0,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Kill processes that change an index; end with status 1 if an index was not whole."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        counts = run_rounds(Path(folder).resolve(), rounds, seed)
    figures = {
        "rounds": rounds,
        **counts.to_json(),
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
    }
    print(json.dumps(figures) if as_json else "\n".join(f"{k}: {v}" for k, v in figures.items()))
    if not counts.is_clean:
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(run)
