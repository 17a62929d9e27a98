"""The Drafter protocol: the interface between a decoding loop and a source of draft tokens."""

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

    Examples are the file being edited, a previous plan or answer, or a template. A wrong prediction
    degrades drafts but never changes an output.

    Attributes:
        tokens: int32[n], at least one.
        label: name in explanations and errors; empty for none.
    """

    tokens: TokenIds
    label: str = ""

    @property
    def shown(self) -> str:
        """Its name in error messages."""
        return f"prediction {self.label!r}" if self.label else "a prediction"


def predictions_of(
    prediction: object, encode: Callable[[str], Sequence[int]], label: str = "prediction"
) -> list[Prediction]:
    """Return the predictions in the `prediction` field of an OpenAI-compatible request.

    It is `{"type": "content", "content": …}` with a text, or with a list of `{"type": "text",
    "text": …}`, whose texts are concatenated.

    Args:
        prediction: parsed JSON; None or an empty text gives no prediction.
        encode: the model's tokenizer, without special tokens.
        label: label of the prediction.

    Raises:
        ValueError: it has another shape; the message is suitable for the caller.
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
    """Options for opening a sequence, besides its prompt.

    All except the tenant are hints: a drafter ignores those that it does not know. Invalid values
    are refused wherever a sequence is opened (`sequences.checked_options`).

    Attributes:
        remember: whether its output joins the generations when it is closed.
        predictions: texts that its output is expected to contain, see `Prediction`; before its
            first token, a draft is the beginning of each of them.
        group: name of a group of concurrent sequences with similar outputs, such as samples of one
            prompt or agents on one task. Tokens committed in one are drafted from by the others of
            the tenant's group in their next step and, if the output is to be remembered, by the
            tenant's other sequences at most 16 tokens later. Empty for none.
        policy_version: version of a model that is trained while it decodes, 0 or more; None if not
            stated. Outputs of an adjacent version count half. This factor is halved with each
            further version, down to an eighth. If not stated, all outputs count in full.
        oldest_version: outputs of older versions do not count at all.
        constraint: form that its output must have: drafts contain nothing that it forbids, and what
            it forces. It changes no output: the decoder applies it, too.
        tenant: tenant of the sequence; no data of other tenants is drafted from. Empty for callers
            without one. A drafter that does not keep tenants apart refuses it, see `Drafter`.
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
        """Whether it has no group and no stated version."""
        return not self.group and self.policy_version is None

    @property
    def without_predictions(self) -> "SequenceOptions":
        """The same without predictions."""
        return replace(self, predictions=()) if self.predictions else self


DEFAULT: Final = SequenceOptions()
"""Default options: the sequence is remembered."""

FORGOTTEN: Final = SequenceOptions(remember=False)
"""Options of a sequence whose output is not remembered."""


class OfOneProcess:
    """An object with open files, connections, threads or a model: can't be copied or pickled."""

    def __reduce__(self) -> str | tuple[object, ...]:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: always; the message says what to do instead.
        """
        raise TypeError(
            f"{type(self).__name__} belongs to the process that made it, and can't be copied or "
            "pickled: make one in each process, from the paths, addresses and options of this one"
        )


class DraftRequest(NamedTuple):
    """One sequence's part of a decoding step.

    This is a named tuple because one is made for each sequence in each step, and a frozen dataclass
    takes three times as long.

    Attributes:
        session: name of a session opened before.
        new_tokens: int32[n], tokens committed since the session's last request (or since it
            was opened).
        length: tokens in the whole sequence, including the prompt and `new_tokens`; detects lost
            and repeated requests.
        budget_nodes: most nodes that the tree may have.
        min_probability: nodes less probable than this are left out.
        outcomes: int32[k] each, tokens that may come next, the likeliest first.
            `AheadDrafter.draft_ahead` drafts after them; `draft` ignores them.
    """

    session: str
    new_tokens: TokenIds
    length: int
    budget_nodes: int
    min_probability: float = 0.0
    outcomes: tuple[TokenIds, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Most nodes of all its trees in total."""
        return self.budget_nodes * (len(self.outcomes) or 1)


def without_outcomes(requests: Sequence[DraftRequest]) -> list[DraftRequest]:
    """Return requests without outcomes, for `Drafter.draft`."""
    return [each._replace(outcomes=()) if each.outcomes else each for each in requests]


class SaveStatus(IntEnum):
    """Where an output is kept, by the number on the wire."""

    NOTHING = 1
    MEMORY = 2
    DISK = 3
    DISK_REFUSED = 4


@dataclass(slots=True, eq=False)
class Saving:
    """The save status of an output.

    Attributes:
        status: `MEMORY`, until it has been written or refused.
    """

    status: SaveStatus = SaveStatus.MEMORY

    def settle(self, *, is_kept: bool) -> None:
        """Set the status: whether the disk has taken the output."""
        self.status = SaveStatus.DISK if is_kept else SaveStatus.DISK_REFUSED


class Drafter(Protocol):
    """Drafts continuations of many sequences at once; keeps a session for each.

    Embedded drafters, remote clients and fusions of these implement it. A drafter may also have
    `add_predictions` (see `EmbeddedDrafter.add_predictions`) for later predictions, `draft_ahead`
    (see `AheadDrafter`), and a true `keeps_tenants` if it keeps tenants apart.
    """

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT, /) -> None:
        """Begin a sequence.

        Args:
            session: a name that no open session has.
            prompt: int32[n], the tokens committed so far.
            options: unknown hints are ignored, but never a tenant: a drafter that does not keep
                tenants apart refuses it, and a `Follower` does so for a drafter without
                `keeps_tenants`.

        Raises:
            SessionExistsError: the name is taken.
            InvalidRequestError: a token is outside the vocabulary, or an option is invalid.
            LimitExceededError: there is no room for it.
        """
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return one tree for each request, in order: one call for a whole decoding step.

        Raises:
            UnknownSessionError: a session is not open.
            OutOfSequenceError: a stated length does not match; nothing of the request is done.
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
    """A `Drafter` that also drafts ahead, for possible outcomes of a running pass.

    If one of the outcomes comes, decoding does not wait for a draft, as in "Speculative Speculative
    Decoding" (arXiv:2603.03251), where a draft model does this.
    """

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float = math.inf
    ) -> list[list[DraftTree]]:
        """Commit new tokens as `draft` does; return a tree for each outcome of each request.

        Outcomes are not committed and change no state; the actual tokens are sent with a later
        request.

        Args:
            requests: requests of one decoding step; `budget_nodes` is per tree.
            timeout_s: no further trees are made after this time, in seconds.

        Returns:
            For each request the trees of its first outcomes, in order: of all of them, or of as
            many as could be drafted for, possibly none.

        Raises: as `Drafter.draft`.
        """
        ...


def keeps_tenants(drafter: object) -> bool:
    """Return whether a drafter keeps the data of several tenants apart."""
    return bool(getattr(drafter, "keeps_tenants", False))


NUM_FOUND: Final = 8
"""Tokens per context in `Findings`, as in Token Recycling (arXiv:2408.08696): they have most of the
probability mass."""

_CONTEXT: Final = np.dtype("<i8")
_TOKEN: Final = np.dtype("<i4")
_LOG_ODDS: Final = np.dtype("<f4")

FINDING_BYTES: Final = _CONTEXT.itemsize + NUM_FOUND * (_TOKEN.itemsize + _LOG_ODDS.itemsize)
"""Bytes of a context with its likely tokens, in memory, on disk and on the wire."""


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """The likeliest next tokens by context, from a model's logits: recycled logits.

    Attributes:
        contexts: int64[n], numbers above 0 of the last one to three tokens; the newest entry is
            last.
        tokens: int32[n, NUM_FOUND], the likeliest next tokens, the likeliest first.
        log_odds: float32[n, NUM_FOUND], log-odds of each token.
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
        """Return findings without contexts."""
        return cls.from_bytes(b"", b"", b"")

    @classmethod
    def from_bytes(cls, contexts: bytes, tokens: bytes, log_odds: bytes) -> Self:
        """Return findings from their arrays' bytes, little-endian, row by row.

        Raises:
            ValueError: the lengths do not match.
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
        """Return the findings of some contexts."""
        return Findings(self.contexts[wanted], self.tokens[wanted], self.log_odds[wanted])

    @classmethod
    def joined(cls, parts: Sequence["Findings"]) -> "Findings":
        """Concatenate several findings, the oldest first; a context may occur more than once."""
        parts = [cls.none(), *parts]
        return Findings(
            np.concatenate([each.contexts for each in parts]),
            np.concatenate([each.tokens for each in parts]),
            np.concatenate([each.log_odds for each in parts]),
        )

    def latest(self) -> NDArray[np.int64]:
        """Return int64[m], ascending, the place of each context's last entry."""
        _, from_end = np.unique(self.contexts[::-1], return_index=True)
        return np.sort(len(self) - 1 - from_end)


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page of the stored findings of a model.

    Attributes:
        findings: newer than those of later pages.
        before: argument for requesting the next page; 0 if this is the last.
    """

    findings: Findings
    before: int = 0


class FindingsStore(Protocol):
    """Stores findings by model: in a state directory, a service, or memory."""

    def share_findings(self, model: str, findings: Findings) -> None:
        """Keep findings of a model.

        Args:
            model: its fingerprint, in hexadecimal digits.
            findings: findings of at most `MAX_FINDINGS` contexts.

        Raises:
            RetrieverError: they are not stored.
        """
        ...

    def fetch_findings(self, model: str, before: int = 0) -> FoundPage:
        """Return a page of the findings of a model; pages go from newest to oldest.

        Args:
            model: its fingerprint.
            before: `before` of the previous page; 0 for the newest.

        Raises:
            RetrieverError: they are not available.
        """
        ...
