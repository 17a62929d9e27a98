"""The counts of a running build, and the reports of finished builds and changes."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from indexer.errors import UnusableError

_MAX_PLACES: Final = 3
"""Documents or lines that a report names for each reason: enough to look at, few enough to read."""

_MAX_FILES: Final = 10
"""Files of conversations that a report names: a screen holds them all."""

_LINES: Final = "lines with an excluded phrase"
_DOCUMENTS: Final = "documents with an excluded phrase"


@dataclass(slots=True)
class ScreenTally:
    """Counts by reason; no text of a document, a phrase or a secret is in it.

    Attributes:
        num_documents: documents left out.
        num_lines: lines left out of documents that stayed.
        num_redacted: documents in which a secret was replaced, in the text, name or licence.
        documents_by_phrase: documents left out, by the phrase's line in its file. A document that
            holds several phrases counts for each.
        lines_by_phrase: lines left out, by the same numbers.
        secrets: places replaced, by kind.
        places: by reason, names of the first documents, at most three, as screened.
    """

    num_documents: int = 0
    num_lines: int = 0
    num_redacted: int = 0
    documents_by_phrase: Counter[int] = field(default_factory=Counter)
    lines_by_phrase: Counter[int] = field(default_factory=Counter)
    secrets: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def exclude_document(self, phrases: Iterable[int], place: str) -> None:
        """Count a document that is left out for the phrases."""
        self.num_documents += 1
        self.documents_by_phrase.update(set(phrases))
        self._keep(_DOCUMENTS, place)

    def exclude_lines(self, phrases: Iterable[Iterable[int]], place: str) -> None:
        """Count lines that are left out of a document, each for its phrases."""
        for of_line in phrases:
            self.num_lines += 1
            self.lines_by_phrase.update(of_line)
            self._keep(_LINES, place)

    def redact(self, kinds: Iterable[str], place: str) -> None:
        """Count secrets that are replaced in a document, by kind."""
        found = Counter(kinds)
        self.num_redacted += bool(found)
        self.secrets += found
        for kind in found:
            self._keep(kind, place)

    def add(self, other: "ScreenTally") -> None:
        """Add the counts of another process, or of an earlier part."""
        self.num_documents += other.num_documents
        self.num_lines += other.num_lines
        self.num_redacted += other.num_redacted
        self.documents_by_phrase += other.documents_by_phrase
        self.lines_by_phrase += other.lines_by_phrase
        self.secrets += other.secrets
        for reason, places in other.places.items():
            for place in places:
                self._keep(reason, place)

    def to_json(self) -> dict[str, Any]:
        """Return the counts for machines to read; phrases are lines of their file, from 1."""
        return {
            "documents_excluded": self.num_documents,
            "lines_excluded": self.num_lines,
            "documents_redacted": self.num_redacted,
            "documents_by_phrase": _ordered(self.documents_by_phrase),
            "lines_by_phrase": _ordered(self.lines_by_phrase),
            "secrets": dict(sorted(self.secrets.items())),
            "places": dict(sorted(self.places.items())),
        }

    def describe(self) -> str:
        """Return the counts for people to read, in one line."""
        documents = _by_phrase(self.documents_by_phrase)
        lines = _by_phrase(self.lines_by_phrase)
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.secrets.most_common())
        parts = [
            f"{self.num_documents} documents left out{documents}{self._first(_DOCUMENTS)}",
            f"{self.num_lines} lines left out{lines}{self._first(_LINES)}",
            f"{self.secrets.total()} secrets redacted in {self.num_redacted} documents"
            + (f" ({kinds})" if kinds else ""),
        ]
        return "; ".join(parts)

    def _keep(self, reason: str, place: str) -> None:
        places = self.places.setdefault(reason, [])
        if len(places) < _MAX_PLACES and place not in places:
            places.append(place)

    def _first(self, reason: str) -> str:
        return f" (first: {self.places[reason][0]})" if reason in self.places else ""


def counted_of(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ordered(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(line): counts[line] for line in sorted(counts)}


def _by_phrase(counts: Counter[int]) -> str:
    """Return which lines of the list were found most often."""
    shown = [f"line {line}: {count}" for line, count in counts.most_common(_MAX_PLACES)]
    more = [f"{len(counts) - _MAX_PLACES} more"] if len(counts) > _MAX_PLACES else []
    return f" by the list's {', '.join(shown + more)}" if shown else ""


@dataclass(slots=True)
class ConversationTally:
    """The conversations that were found in one file in one shape.

    Attributes:
        kind: of the turns that are taken, in words: "assistant turns".
        num_conversations: of which any was taken or not.
        num_turns: turns that were taken.
        left_out: of the conversations, by kind: images, empty turns, turns of unknown roles.
        missing_field: a key that was named for the text, and that none of them has; else empty.
        file: its name.
        shape: in words.
    """

    kind: str
    num_conversations: int = 0
    num_turns: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    missing_field: str = ""
    file: str = ""
    shape: str = ""

    def add(self, other: "ConversationTally") -> None:
        """Add the counts of another part of the file."""
        self.num_conversations += other.num_conversations
        self.num_turns += other.num_turns
        self.left_out.update(other.left_out)

    def describe(self) -> str:
        """Return the counts in words."""
        counts = ", ".join(f"{count:,} x {what}" for what, count in self.left_out.most_common())
        without = f"; left out: {counts}" if counts else ""
        unused = f"; none has the field {self.missing_field!r}" if self.missing_field else ""
        kind = self.kind.removesuffix("s") if self.num_turns == 1 else self.kind
        conversations = counted_of(self.num_conversations, "conversation")
        return f"{self.num_turns:,} {kind} of {conversations}{unused}{without}"


@dataclass(slots=True)
class BuildTally:
    """Counts that the stages of a build keep, and that progress shows.

    Attributes:
        num_documents: documents tokenised.
        num_tokens: their tokens, separators not counted.
        num_bytes: their text in UTF-8.
        skipped: documents and files left out, by reason.
        skipped_places: where the first was, by reason, if known.
        remedies: what to do, by reason, where something can be done.
        num_dropped: of those that were skipped, the documents and files that were meant to be
            read and could not be. The others were passed over by a rule.
        conversations: that records held, by file and shape: `file: shape`.
        by_content: files of unknown suffix whose first bytes are text, by suffix; they are read.
        num_bytes_read: bytes of the source files, as on disk, that were read or skipped.
        num_files_found: source files so far.
        num_bytes_found: their size; 0 where documents do not come from files.
        screened: what screening took out; None where nothing was screened for.
        stage_seconds: time of each stage that has ended, by its name.
        doing: what is done now, for people to read.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    skipped_places: dict[str, str] = field(default_factory=dict)
    remedies: dict[str, str] = field(default_factory=dict)
    num_dropped: int = 0
    conversations: dict[str, ConversationTally] = field(default_factory=dict)
    by_content: Counter[str] = field(default_factory=Counter)
    num_bytes_read: int = 0
    num_files_found: int = 0
    num_bytes_found: int = 0
    screened: ScreenTally | None = None
    stage_seconds: dict[str, float] = field(default_factory=dict)
    doing: str = ""

    def now(self, doing: str) -> "BuildTally":
        """Note what is done from now on; return itself."""
        self.doing = doing
        return self

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Take the time of a stage."""
        begun = time.perf_counter()
        yield
        self.stage_seconds[name] = time.perf_counter() - begun

    @property
    def dropped_share(self) -> float:
        """Share of the documents and files that could not be read, from 0 to 1."""
        return self.num_dropped / max(self.num_dropped + self.num_documents, 1)

    def skip(self, reason: str, place: str, remedy: str = "") -> None:
        """Count a document that is left out, and keep the place of the first one.

        Args:
            reason: under which it is counted.
            place: a file, or a file and a line or row.
            remedy: what to do; that of the first one is kept.
        """
        self.skipped[reason] += 1
        self.skipped_places.setdefault(reason, place)
        if remedy:
            self.remedies.setdefault(reason, remedy)

    def drop(self, reason: str, place: str, remedy: str = "") -> None:
        """Count a document or a file that was meant to be read and cannot be; see `skip`."""
        self.num_dropped += 1
        self.skip(reason, place, remedy)

    def dropping(self, place: str) -> "_Dropping":
        """Count what the block finds unusable; see `drop`."""
        return _Dropping(self, place)

    def count_conversation(self, file: str, shape: str, counted: ConversationTally) -> None:
        """Count conversations of a file in a shape."""
        place = f"{file}: {shape}"
        if place in self.conversations:
            self.conversations[place].add(counted)
        else:
            self.conversations[place] = replace(counted, file=file, shape=shape)

    def merge(self, other: "BuildTally") -> None:
        """Add the counts of another process, except for documents and tokens."""
        self.num_bytes += other.num_bytes
        self.num_bytes_read += other.num_bytes_read
        self.num_dropped += other.num_dropped
        self.skipped.update(other.skipped)
        self.skipped_places = {**other.skipped_places, **self.skipped_places}
        self.remedies = {**other.remedies, **self.remedies}
        self.by_content.update(other.by_content)
        for counted in other.conversations.values():
            self.count_conversation(counted.file, counted.shape, counted)
        if self.screened is None:
            self.screened = other.screened
        elif other.screened is not None:
            self.screened.add(other.screened)

    def describe_skipped(self) -> str:
        """Return reasons and counts in words, most frequent first; empty where there are none."""
        reasons = sorted(self.skipped.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{count} {reason}{self._hint(reason)}" for reason, count in reasons)

    def _hint(self, reason: str) -> str:
        first, remedy = self.skipped_places.get(reason), self.remedies.get(reason)
        parts = ([f"first: {first}"] if first else []) + ([remedy] if remedy else [])
        return f" ({'; '.join(parts)})" if parts else ""

    def describe_conversations(self) -> list[str]:
        """Return a line for each file, at most `_MAX_FILES`, and one for all others together."""
        lines = [f"{place}, {tally.describe()}" for place, tally in self.conversations.items()]
        num_more = len(lines) - _MAX_FILES
        return lines if num_more <= 0 else [*lines[:_MAX_FILES], f"and {num_more} more such files"]

    def describe_suffixes(self) -> list[str]:
        """Return a line of the suffixes that were read for their content, if there are any."""
        counts = [
            f"{count:,} {suffix}" for suffix, count in self.by_content.most_common(_MAX_FILES)
        ]
        num_more = len(self.by_content) - len(counts)
        more = [f"{num_more} more suffixes"] if num_more > 0 else []
        return [f"read as text by content: {', '.join(counts + more)}"] if counts else []

    def described(self, report: str, *, nothing_skipped: str = "") -> str:
        """Return a report for people to read, between what was found and what was left out."""
        skipped = self.describe_skipped() or nothing_skipped
        lines = [*self.describe_conversations(), *self.describe_suffixes(), report]
        lines += [f"skipped: {skipped}"] if skipped else []
        lines += [f"screened: {self.screened.describe()}"] if self.screened is not None else []
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return what was found and left out for machines to read."""
        return {
            "skipped": dict(sorted(self.skipped.items())),
            "skipped_places": dict(sorted(self.skipped_places.items())),
            "dropped": self.num_dropped,
            "by_content": dict(self.by_content.most_common()),
            "conversations": [
                {
                    "file": tally.file,
                    "shape": tally.shape,
                    "conversations": tally.num_conversations,
                    "turns": tally.num_turns,
                    "left_out": dict(tally.left_out),
                }
                for tally in self.conversations.values()
            ],
            "screened": self.screened.to_json() if self.screened is not None else None,
        }


@dataclass(slots=True)
class _Dropping:
    """Stands around a block for each record, and is no generator for that."""

    tally: BuildTally
    place: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, UnusableError):
            return False
        self.tally.drop(str(error), self.place, error.remedy)
        return True


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The report of a finished build.

    Attributes:
        output: the index's directory.
        num_documents: documents in the index.
        num_tokens: tokens in the index, separators not counted.
        num_segments: segments in the index.
        seconds: time taken, the loading of the tokenizer not counted.
        tally: what was read, and what was left out.
    """

    output: str
    num_documents: int
    num_tokens: int
    num_segments: int
    seconds: float
    tally: BuildTally

    @property
    def tokens_per_s(self) -> float:
        """Tokens indexed per second."""
        return self.num_tokens / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        """Return the report for machines to read."""
        stages = self.tally.stage_seconds.items()
        return {
            "output": self.output,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "segments": self.num_segments,
            "bytes": self.tally.num_bytes,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens_per_s),
            "stage_seconds": {name: round(seconds, 3) for name, seconds in stages},
            **self.tally.to_json(),
        }

    def describe(self) -> str:
        """Return the report for people to read."""
        each = self.tally.stage_seconds.items()
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in each)
        documents = counted_of(self.num_documents, "document")
        tokens = counted_of(self.num_tokens, "token")
        report = (
            f"{self.output}: {documents}, {tokens} in {counted_of(self.num_segments, 'segment')}\n"
            f"{self.tally.num_bytes:,} bytes of text in {self.seconds:.1f} s, "
            f"{self.tokens_per_s:,.0f} tokens/s ({stages})"
        )
        return self.tally.described(report, nothing_skipped="nothing")


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """The report of a change of an index.

    Attributes:
        path: the index's directory.
        verb: "added", "removed" or "merged".
        num_documents: documents that were; of a merge, by how many segments there are fewer.
        num_tokens: their tokens, separators not counted.
        num_segments: segments that the index has now.
        num_older: older snapshots that are still read, and stay until the next change.
        seconds: time taken.
        tally: what was read, and what was left out.
        num_replaced: documents in whose place others of their names were added.
        num_earlier: documents that stay, and of whose names others were added.
    """

    path: str
    verb: str
    num_documents: int
    num_tokens: int
    num_segments: int
    num_older: int
    seconds: float
    tally: BuildTally = field(default_factory=BuildTally)
    num_replaced: int = 0
    num_earlier: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the report for machines to read."""
        return {
            "path": self.path,
            self.verb: self.num_documents,
            "tokens": self.num_tokens,
            "segments": self.num_segments,
            "older_snapshots": self.num_older,
            "seconds": round(self.seconds, 3),
            "replaced": self.num_replaced,
            "earlier_versions": self.num_earlier,
            **self.tally.to_json(),
        }

    def describe(self) -> str:
        """Return the report for people to read."""
        documents = counted_of(self.num_documents, "document")
        what = f"{self.verb} {documents}, {counted_of(self.num_tokens, 'token')}"
        if self.verb == "merged":
            what = f"{counted_of(self.num_documents, 'segment')} fewer"
        now = f"{counted_of(self.num_segments, 'segment')} now"
        lines = [self.tally.described(f"{self.path}: {what} in {self.seconds:.1f} s; {now}")]
        if self.num_older:
            lines.append(
                f"{self.num_older} snapshot(s) from before are still read: their files go with the "
                "next change, or `compact`, after their readers"
            )
        if self.num_replaced:
            lines.append(f"replaced: {self.num_replaced:,} document(s)")
        if self.num_earlier:
            lines.append(
                f"{self.num_earlier:,} document(s) of the same names are still there, with other "
                "texts: `add --replace` puts new ones in their place, `remove` takes them out"
            )
        return "\n".join(lines)
