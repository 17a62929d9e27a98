"""The Drafter protocol: what a decoding loop asks of a source of draft tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from retriever.tree import DraftTree

TokenIds = NDArray[np.int32]
"""int32[n], token ids of one sequence in order."""

NO_TOKENS: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """A text that the output is expected to contain, as a whole or in parts.

    The file that is edited, the plan or the answer of before, a template. A wrong one costs drafts
    and never changes an output.

    Attributes:
        tokens: int32[n], at least one.
        label: names it in explanations and errors; empty for none.
    """

    tokens: TokenIds
    label: str = ""

    @property
    def shown(self) -> str:
        """What it is called in error messages."""
        return f"prediction {self.label!r}" if self.label else "a prediction"


def predictions_of(
    prediction: object, encode: Callable[[str], Sequence[int]], label: str = "prediction"
) -> list[Prediction]:
    """Return what the `prediction` of a request to an OpenAI-compatible server states.

    It is `{"type": "content", "content": …}` with a text, or with a list of `{"type": "text",
    "text": …}`, whose texts are one.

    Args:
        prediction: parsed JSON; None, and one without text, state nothing.
        encode: the model's tokenizer, without special tokens.
        label: of what is returned.

    Raises:
        ValueError: it has another shape; the message is fit for the caller.
    """
    text = _predicted_text(prediction)
    if not text:
        return []
    return [Prediction(np.array(encode(text), np.int32), label)]


def _predicted_text(prediction: object) -> str:
    if prediction is None:
        return ""
    if not isinstance(prediction, Mapping) or prediction.get("type") != "content":
        raise ValueError(
            'prediction must be {"type": "content", "content": TEXT}: other types are not known'
        )
    content = prediction.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError("prediction.content must be a text or a list of parts")  # noqa: TRY004  (a shape)
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError(
                'prediction.content must have parts of the form {"type": "text", "text": TEXT}'
            )
    return "".join(part["text"] for part in content)


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """What an output must look like; exactly one of these is given.

    Attributes:
        json_schema: a JSON schema, as JSON: the output is JSON that it describes.
        regular_expression: the whole output matches it.
        choices: texts, one of which the output is.
    """

    json_schema: str | None = None
    regular_expression: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Its size as UTF-8."""
        texts = (self.json_schema or "", self.regular_expression or "", *self.choices)
        return sum(len(text.encode(errors="replace")) for text in texts)


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """What a sequence is opened with, besides its prompt.

    All but the tenant are hints: a drafter does not use those that it does not know. A value that
    cannot be one is refused wherever a sequence is opened (`sequences.checked_options`).

    Attributes:
        remember: whether its output joins the generations when it is closed.
        predictions: texts that its output is expected to contain, see `Prediction`; before its
            first token, a draft is the beginning of each of them.
        group: sequences that run at once and say the same: samples of one prompt, agents at one
            task. What is committed in one serves the others of its tenant's group in their next
            step, and the others of its tenant at most 16 tokens later if it is to be remembered.
            Empty for none.
        policy_version: of a model that is trained while it decodes, 0 or more; None if it is not
            stated. What the next version or the one before has written counts half, what is further
            off half of that, and an eighth at least. Where it is not stated, all counts in full.
        oldest_version: what older versions have written does not count at all.
        constraint: what its output must look like: drafts hold nothing that this forbids, and what
            it forces. It changes no output: who decodes applies it, too.
        tenant: whose it is: nothing of another tenant's is drafted. Empty for callers without one.
            A drafter that keeps none apart refuses it, see `Drafter`.
    """

    remember: bool = True
    predictions: tuple[Prediction, ...] = ()
    group: str = ""
    policy_version: int | None = None
    oldest_version: int = 0
    constraint: OutputConstraint | None = None
    tenant: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether it has no group, and its version is not stated."""
        return not self.group and self.policy_version is None

    @property
    def without_predictions(self) -> "SequenceOptions":
        """The same without predictions."""
        return replace(self, predictions=()) if self.predictions else self


DEFAULT: Final = SequenceOptions()
"""Of a sequence that is remembered, of which nothing else is stated."""

FORGOTTEN: Final = SequenceOptions(remember=False)
"""Of a sequence that leaves nothing behind."""


class OfOneProcess:
    """What holds open files, connections, threads or a model, and so can't be copied or pickled."""

    def __reduce__(self) -> str | tuple[object, ...]:
        """Refuse both.

        Raises:
            TypeError: always; the message says what to do instead.
        """
        raise TypeError(
            f"{type(self).__name__} belongs to the process that made it, and can't be copied or "
            "pickled: make one in each process, from the paths, addresses and options of this one"
        )


class DraftRequest(NamedTuple):
    """One sequence's part of a decoding step.

    A named tuple: one is made for each sequence in each step, and a frozen class takes three times
    as long.

    Attributes:
        session: name of a session opened before.
        new_tokens: int32[n], tokens committed since the session's last request (or since it
            was opened).
        length: tokens in the whole sequence, prompt and `new_tokens` included; detects lost and
            repeated requests.
        budget_nodes: most nodes that the tree may have.
        min_probability: nodes less probable than this are not worth sending.
        outcomes: int32[k] each, tokens that may come next, the likeliest first. Drafts after them
            are asked for with `AheadDrafter.draft_ahead`; `draft` ignores them.
    """

    session: str
    new_tokens: TokenIds
    length: int
    budget_nodes: int
    min_probability: float = 0.0
    outcomes: tuple[TokenIds, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Most nodes of all its trees together."""
        return self.budget_nodes * (len(self.outcomes) or 1)


def without_outcomes(requests: Sequence[DraftRequest]) -> list[DraftRequest]:
    """Return requests as `Drafter.draft` takes them."""
    return [each._replace(outcomes=()) if each.outcomes else each for each in requests]


class SaveStatus(IntEnum):
    """Where an output is kept, by the number on the wire."""

    NOTHING = 1
    MEMORY = 2
    DISK = 3
    DISK_REFUSED = 4


@dataclass(slots=True, eq=False)
class Saving:
    """What became of an output.

    Attributes:
        status: in memory, until it has been written or refused.
    """

    status: SaveStatus = SaveStatus.MEMORY

    def settle(self, *, is_kept: bool) -> None:
        """Note whether the disk has taken it."""
        self.status = SaveStatus.DISK if is_kept else SaveStatus.DISK_REFUSED


class Drafter(Protocol):
    """Drafts continuations of many sequences at once; keeps a session for each.

    Embedded drafters, remote clients and fusions of these implement it. A drafter may have more:
    `add_predictions` (see `EmbeddedDrafter.add_predictions`) for predictions that come later,
    `draft_ahead` (see `AheadDrafter`), and a true `keeps_tenants` if it keeps tenants apart.
    """

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT, /) -> None:
        """Begin a sequence.

        Args:
            session: a name that no open session has.
            prompt: int32[n], the tokens committed so far.
            options: hints that are not known are ignored. A tenant is never: who keeps none apart
                refuses it, and a `Follower` does so for a drafter without `keeps_tenants`.

        Raises:
            SessionExistsError: the name is taken.
            InvalidRequestError: a token is outside the vocabulary, or an option has no possible
                value.
            LimitExceededError: there is no room for it.
        """
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return one tree for each request, in order: one call for a whole decoding step.

        Raises:
            UnknownSessionError: a session is not open.
            OutOfSequenceError: a stated length does not fit; nothing of the request is kept.
            DrafterUnavailableError: no answer in time; the loop continues without drafts.
        """
        ...

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence with the tokens committed since its last request.

        Raises:
            UnknownSessionError: the session is not open.
        """
        ...


@runtime_checkable
class AheadDrafter(Protocol):
    """A `Drafter` that also drafts ahead, for what may come of a pass that is under way.

    Decoding then waits for no draft where one of the outcomes comes, as in "Speculative
    Speculative Decoding" (arXiv:2603.03251), where a draft model answers for them.
    """

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float = math.inf
    ) -> list[list[DraftTree]]:
        """Commit new tokens as `draft` does; return a tree for each outcome of each request.

        Outcomes are not committed and leave nothing behind; what came of them is sent as new tokens
        of a later request.

        Args:
            requests: of one decoding step; `budget_nodes` are of each tree.
            timeout_s: trees that take longer than this are not made, in seconds.

        Returns:
            For each request the trees of its first outcomes, in order: of all of them, or of as
            many as could be answered, which may be none.

        Raises: as `Drafter.draft`.
        """
        ...


def keeps_tenants(drafter: object) -> bool:
    """Return whether a drafter keeps what it has of several tenants apart."""
    return bool(getattr(drafter, "keeps_tenants", False))


NUM_FOUND: Final = 8
"""Tokens of a context in `Findings`, as in Token Recycling (arXiv:2408.08696): they hold most of
the probability."""

_CONTEXT: Final = np.dtype("<i8")
_TOKEN: Final = np.dtype("<i4")
_LOG_ODDS: Final = np.dtype("<f4")

FINDING_BYTES: Final = _CONTEXT.itemsize + NUM_FOUND * (_TOKEN.itemsize + _LOG_ODDS.itemsize)
"""Bytes of a context with its likely tokens, in memory, on disk and on the wire."""


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """What a model found likely next, by the last tokens: recycled logits of verified passes.

    Attributes:
        contexts: int64[n], numbers of the last one to three tokens, above 0; the last one written
            stands last.
        tokens: int32[n, NUM_FOUND], the likeliest next tokens, the likeliest first.
        log_odds: float32[n, NUM_FOUND], of each of them.
    """

    contexts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    log_odds: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return FINDING_BYTES * len(self)

    @classmethod
    def none(cls) -> Self:
        """Return findings of no context."""
        return cls.from_bytes(b"", b"", b"")

    @classmethod
    def from_bytes(cls, contexts: bytes, tokens: bytes, log_odds: bytes) -> Self:
        """Return findings from their arrays' bytes, little-endian, row by row.

        Raises:
            ValueError: they are not of the same contexts.
        """
        count = len(contexts) // _CONTEXT.itemsize
        sizes = (_CONTEXT.itemsize, NUM_FOUND * _TOKEN.itemsize, NUM_FOUND * _LOG_ODDS.itemsize)
        for name, part, size in zip(
            ("contexts", "tokens", "log-odds"), (contexts, tokens, log_odds), sizes, strict=True
        ):
            if len(part) != count * size:
                raise ValueError(
                    f"{len(part)} bytes of {name}, where {count} contexts have {count * size}"
                )
        return cls(
            np.frombuffer(contexts, _CONTEXT).astype(np.int64),
            np.frombuffer(tokens, _TOKEN).astype(np.int32).reshape(count, NUM_FOUND),
            np.frombuffer(log_odds, _LOG_ODDS).astype(np.float32).reshape(count, NUM_FOUND),
        )

    def to_bytes(self) -> tuple[bytes, bytes, bytes]:
        """Return the bytes of each array, for `from_bytes`."""
        return (
            self.contexts.astype(_CONTEXT).tobytes(),
            self.tokens.astype(_TOKEN).tobytes(),
            self.log_odds.astype(_LOG_ODDS).tobytes(),
        )

    def part(self, wanted: slice | NDArray[np.bool_] | NDArray[np.int64]) -> "Findings":
        """Return those of some contexts."""
        return Findings(self.contexts[wanted], self.tokens[wanted], self.log_odds[wanted])

    @classmethod
    def joined(cls, parts: Sequence["Findings"]) -> "Findings":
        """Return all of several, the oldest first; a context may stand there more than once."""
        parts = [cls.none(), *parts]
        return Findings(
            np.concatenate([each.contexts for each in parts]),
            np.concatenate([each.tokens for each in parts]),
            np.concatenate([each.log_odds for each in parts]),
        )

    def latest(self) -> NDArray[np.int64]:
        """Return int64[m], rising, the place of each context's last entry."""
        _, from_end = np.unique(self.contexts[::-1], return_index=True)
        return np.sort(len(self) - 1 - from_end)


@dataclass(frozen=True, slots=True)
class FoundPage:
    """Some of the findings that are kept of a model.

    Attributes:
        findings: newer than those of later pages.
        before: what to ask the next page with; 0: there is none.
    """

    findings: Findings
    before: int = 0


class FindingsStore(Protocol):
    """Keeps what models found likely, by model: a state directory, a service, or memory."""

    def share_findings(self, model: str, findings: Findings) -> None:
        """Keep findings of a model.

        Args:
            model: its fingerprint, in hexadecimal digits.
            findings: of at most `MAX_FINDINGS` contexts.

        Raises:
            RetrieverError: they are not kept.
        """
        ...

    def fetch_findings(self, model: str, before: int = 0) -> FoundPage:
        """Return a page of what is kept of a model, the newest first.

        Args:
            model: its fingerprint.
            before: of the last page; 0 for the newest.

        Raises:
            RetrieverError: they cannot be had.
        """
        ...
