"""The counts of a running build, and the reports of finished builds and changes."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from indexer.errors import UnusableError

_MAX_PLACES: Final = 3
"""Most documents or lines that a report names for each reason."""

_MAX_FILES: Final = 10
"""Most conversation files that a report names. They fit on one screen."""

_LINES: Final = "lines with an excluded phrase"
_DOCUMENTS: Final = "documents with an excluded phrase"


@dataclass(slots=True)
class ScreenTally:
    """Counts of what screening removed, by reason. Holds no document text, phrase or secret.

    Attributes:
        num_documents: number of excluded documents.
        num_lines: number of lines removed from documents that stay in the index.
        num_redacted: number of documents in which a secret was replaced, in the text, name or
            licence.
        documents_by_phrase: number of excluded documents, by the phrase's line number in the
            phrase file. A document with several phrases counts for each phrase.
        lines_by_phrase: number of removed lines, by the phrase's line number in the phrase file.
        secrets: number of replaced secrets, by kind.
        places: names of the first documents for each reason, at most three, after screening.
    """

    num_documents: int = 0
    num_lines: int = 0
    num_redacted: int = 0
    documents_by_phrase: Counter[int] = field(default_factory=Counter)
    lines_by_phrase: Counter[int] = field(default_factory=Counter)
    secrets: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def exclude_document(self, phrases: Iterable[int], place: str) -> None:
        """Count a document that is excluded because it contains phrases."""
        self.num_documents += 1
        self.documents_by_phrase.update(set(phrases))
        self._keep(_DOCUMENTS, place)

    def exclude_lines(self, phrases: Iterable[Iterable[int]], place: str) -> None:
        """Count lines that are removed from a document; `phrases` has one entry per line."""
        for of_line in phrases:
            self.num_lines += 1
            self.lines_by_phrase.update(of_line)
            self._keep(_LINES, place)

    def redact(self, kinds: Iterable[str], place: str) -> None:
        """Count the secrets that are replaced in a document, by kind."""
        found = Counter(kinds)
        self.num_redacted += bool(found)
        self.secrets += found
        for kind in found:
            self._keep(kind, place)

    def add(self, other: "ScreenTally") -> None:
        """Add the counts from another process or from an earlier part."""
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
        """Return the counts as JSON values; phrases are identified by line number, from 1."""
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
        """Return the counts as one line of text."""
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
    """Return a number followed by its noun, in the plural unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ordered(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(line): counts[line] for line in sorted(counts)}


def _by_phrase(counts: Counter[int]) -> str:
    """Return the line numbers of the phrases that were found most often."""
    shown = [f"line {line}: {count}" for line, count in counts.most_common(_MAX_PLACES)]
    more = [f"{len(counts) - _MAX_PLACES} more"] if len(counts) > _MAX_PLACES else []
    return f" by the list's {', '.join(shown + more)}" if shown else ""


@dataclass(slots=True)
class ConversationTally:
    """Counts of the conversations of one shape in one file.

    Attributes:
        kind: kind of the turns that are indexed, in words: "assistant turns".
        num_conversations: number of conversations, whether or not any turn was indexed.
        num_turns: number of turns that were indexed.
        left_out: number of conversation parts that were left out, by kind: images, empty turns,
            turns of unknown roles.
        missing_field: the requested text key, if no conversation has it; otherwise empty.
        file: name of the file.
        shape: name of the shape.
    """

    kind: str
    num_conversations: int = 0
    num_turns: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    missing_field: str = ""
    file: str = ""
    shape: str = ""

    def add(self, other: "ConversationTally") -> None:
        """Add the counts from another part of the file."""
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
    """Counts of the build stages, shown by the progress display.

    Attributes:
        num_documents: number of tokenised documents.
        num_tokens: number of tokens in these documents, without separators.
        num_bytes: size of these documents' text in UTF-8.
        skipped: number of documents and files left out, by reason.
        skipped_places: place of the first skipped item, by reason, if known.
        remedies: what the user can do, by reason, if anything.
        num_dropped: number of documents and files that should have been read but could not be. All
            other skipped items were skipped by a rule.
        conversations: counts of conversations in records, by file and shape (`file: shape`).
        by_content: number of files with an unknown suffix that are read because they start with
            text, by suffix.
        num_bytes_read: bytes of source files, as on disk, that were read or skipped.
        num_files_found: number of source files found so far.
        num_bytes_found: total size of the source files; 0 if documents do not come from files.
        screened: what screening removed; None if there was no screening.
        stage_seconds: duration of each finished stage, by name.
        doing: description of the current work.
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
        """Set the description of the current work and return this tally."""
        self.doing = doing
        return self

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure how long a stage takes."""
        begun = time.perf_counter()
        yield
        self.stage_seconds[name] = time.perf_counter() - begun

    @property
    def dropped_share(self) -> float:
        """Share of the documents and files that could not be read, from 0 to 1."""
        return self.num_dropped / max(self.num_dropped + self.num_documents, 1)

    def skip(self, reason: str, place: str, remedy: str = "") -> None:
        """Count a document that is left out. The place of the first one per reason is recorded.

        Args:
            reason: reason under which it is counted.
            place: file, or file and line or row.
            remedy: what the user can do; the first remedy per reason is recorded.
        """
        self.skipped[reason] += 1
        self.skipped_places.setdefault(reason, place)
        if remedy:
            self.remedies.setdefault(reason, remedy)

    def drop(self, reason: str, place: str, remedy: str = "") -> None:
        """Count a document or file that should have been read but cannot be; see `skip`."""
        self.num_dropped += 1
        self.skip(reason, place, remedy)

    def dropping(self, place: str) -> "_Dropping":
        """Return a context manager that counts an unusable item in its block; see `drop`."""
        return _Dropping(self, place)

    def count_conversation(self, file: str, shape: str, counted: ConversationTally) -> None:
        """Count the conversations of one shape in a file."""
        place = f"{file}: {shape}"
        if place in self.conversations:
            self.conversations[place].add(counted)
        else:
            self.conversations[place] = replace(counted, file=file, shape=shape)

    def merge(self, other: "BuildTally") -> None:
        """Add the counts from another process, except for documents and tokens."""
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
        """Return the skip reasons with their counts, most frequent first; may be empty."""
        reasons = sorted(self.skipped.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{count} {reason}{self._hint(reason)}" for reason, count in reasons)

    def _hint(self, reason: str) -> str:
        first, remedy = self.skipped_places.get(reason), self.remedies.get(reason)
        parts = ([f"first: {first}"] if first else []) + ([remedy] if remedy else [])
        return f" ({'; '.join(parts)})" if parts else ""

    def describe_conversations(self) -> list[str]:
        """Return one line per file, for at most `_MAX_FILES` files, and one line for the rest."""
        lines = [f"{place}, {tally.describe()}" for place, tally in self.conversations.items()]
        num_more = len(lines) - _MAX_FILES
        return lines if num_more <= 0 else [*lines[:_MAX_FILES], f"and {num_more} more such files"]

    def describe_suffixes(self) -> list[str]:
        """Return a line that lists the suffixes of files read because of their content, if any."""
        counts = [
            f"{count:,} {suffix}" for suffix, count in self.by_content.most_common(_MAX_FILES)
        ]
        num_more = len(self.by_content) - len(counts)
        more = [f"{num_more} more suffixes"] if num_more > 0 else []
        return [f"read as text by content: {', '.join(counts + more)}"] if counts else []

    def described(self, report: str, *, nothing_skipped: str = "") -> str:
        """Return a report, preceded by what was found and followed by what was left out."""
        skipped = self.describe_skipped() or nothing_skipped
        lines = [*self.describe_conversations(), *self.describe_suffixes(), report]
        lines += [f"skipped: {skipped}"] if skipped else []
        lines += [f"screened: {self.screened.describe()}"] if self.screened is not None else []
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return what was found and what was left out, as JSON values."""
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
    """Context manager around the work on one record. As a generator it would be slower."""

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
        output: directory of the index.
        num_documents: number of documents in the index.
        num_tokens: number of tokens in the index, without separators.
        num_segments: number of segments in the index.
        seconds: duration of the build, without loading the tokenizer.
        tally: counts of what was read and what was left out.
    """

    output: str
    num_documents: int
    num_tokens: int
    num_segments: int
    seconds: float
    tally: BuildTally

    @property
    def tokens_per_s(self) -> float:
        """Number of tokens indexed per second."""
        return self.num_tokens / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
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
        """Return the report as text."""
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
    """The report of a change to an index.

    Attributes:
        path: directory of the index.
        verb: "added", "removed" or "merged".
        num_documents: number of added or removed documents. For a merge: by how much the number of
            segments fell.
        num_tokens: number of tokens in these documents, without separators.
        num_segments: number of segments that the index has now.
        num_older: number of older snapshots that readers still use. They stay on disk until the
            next change.
        seconds: duration of the change.
        tally: counts of what was read and what was left out.
        num_replaced: number of old documents that were replaced by added ones of the same name.
        num_earlier: number of old documents that stay although a document of the same name was
            added.
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
        """Return the report as JSON values."""
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
        """Return the report as text."""
        documents = counted_of(self.num_documents, "document")
        what = f"{self.verb} {documents}, {counted_of(self.num_tokens, 'token')}"
        if self.verb == "merged":
            what = f"{counted_of(self.num_documents, 'segment')} fewer"
        now = f"{counted_of(self.num_segments, 'segment')} now"
        lines = [self.tally.described(f"{self.path}: {what} in {self.seconds:.1f} s; {now}")]
        if self.num_older:
            lines.append(
                f"{self.num_older} older snapshot(s) are still being read: the next change or "
                "`compact` removes their files once nothing reads them"
            )
        if self.num_replaced:
            lines.append(f"replaced: {self.num_replaced:,} document(s)")
        if self.num_earlier:
            lines.append(
                f"{self.num_earlier:,} document(s) of the same names are still there, with other "
                "texts: `add --replace` replaces them, `remove` removes them"
            )
        return "\n".join(lines)
