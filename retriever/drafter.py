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
        tokens: int32[n], token ids of the text; at least one.
        label: name of the text in explanations and errors; empty for no name.
    """

    tokens: TokenIds
    label: str = ""

    @property
    def shown(self) -> str:
        """The prediction's name in error messages."""
        return f"prediction {self.label!r}" if self.label else "a prediction"


def predictions_of(
    prediction: object, encode: Callable[[str], Sequence[int]], label: str = "prediction"
) -> list[Prediction]:
    """Return the predictions in the `prediction` field of an OpenAI-compatible request.

    The field is `{"type": "content", "content": …}`. Its content is a text, or a list of `{"type":
    "text", "text": …}` whose texts are concatenated.

    Args:
        prediction: parsed JSON; None or an empty text gives no prediction.
        encode: encodes a text with the model's tokenizer, without special tokens.
        label: label of the prediction.

    Raises:
        ValueError: the field has another form; the message can be shown to the caller.
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
            'prediction must be {"type": "content", "content": TEXT}: no other type works'
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
    """The form that an output must have: exactly one attribute is given.

    Attributes:
        json_schema: a JSON schema, as JSON; the output must be JSON that matches it.
        regular_expression: a regular expression that the whole output must match.
        choices: texts; the output must be one of them.
    """

    json_schema: str | None = None
    regular_expression: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The constraint's size as UTF-8, in bytes."""
        texts = (self.json_schema or "", self.regular_expression or "", *self.choices)
        return sum(len(text.encode(errors="replace")) for text in texts)


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """Options for opening a sequence, in addition to its prompt.

    All options except the tenant are hints: a drafter ignores hints that it does not know. Invalid
    values are refused wherever a sequence is opened (`sequences.checked_options`).

    Attributes:
        remember: whether the output joins the generations when the sequence is closed.
        predictions: texts that the output is expected to contain, see `Prediction`. Before the
            first token of the output, the draft holds the beginning of each text.
        group: name of a group of concurrent sequences with similar outputs, such as samples of one
            prompt or agents on one task; empty for no group. Other sequences in the tenant's group
            draft from the tokens committed in one sequence, from their next step on. If the output
            is to be remembered, the tenant's sequences outside the group use them at most 16 tokens
            later.
        policy_version: version of a model that is trained while it decodes, 0 or more; None if not
            stated. Outputs of an adjacent version have half the weight. Each further version halves
            the weight, down to an eighth. If no version is stated, all outputs have full weight.
        oldest_version: outputs of versions older than this one are not used.
        constraint: form that the output must have. Drafts contain the tokens that it forces, and
            none that it forbids. The constraint changes no output, because the decoder applies it,
            too.
        tenant: tenant of the sequence, empty for callers without a tenant. Drafts use no data of
            other tenants. A drafter that does not keep tenants apart refuses the sequence, see
            `Drafter`.
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
        """Whether the sequence has no group and no stated version."""
        return not self.group and self.policy_version is None

    @property
    def without_predictions(self) -> "SequenceOptions":
        """The same options without predictions."""
        return replace(self, predictions=()) if self.predictions else self


DEFAULT: Final = SequenceOptions()
"""Default options: the output is remembered."""

FORGOTTEN: Final = SequenceOptions(remember=False)
"""Options of a sequence whose output is not remembered."""


class OfOneProcess:
    """An object with open files, connections, threads or a model; it can't be copied or pickled."""

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
    takes three times as long to make.

    Attributes:
        session: name of a session opened before.
        new_tokens: int32[n], tokens committed since the session's last request (or since it
            was opened).
        length: tokens in the whole sequence, including the prompt and `new_tokens`. This number
            reveals lost and repeated requests.
        budget_nodes: most nodes that the tree may have.
        min_probability: nodes less probable than this are left out.
        outcomes: runs of tokens that may come next, int32[k] each, the likeliest run first.
            `AheadDrafter.draft_ahead` drafts a tree for each run; `draft` ignores them.
    """

    session: str
    new_tokens: TokenIds
    length: int
    budget_nodes: int
    min_probability: float = 0.0
    outcomes: tuple[TokenIds, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Largest total number of nodes in all trees of the request."""
        return self.budget_nodes * (len(self.outcomes) or 1)


def without_outcomes(requests: Sequence[DraftRequest]) -> list[DraftRequest]:
    """Return requests without outcomes, for `Drafter.draft`."""
    return [each._replace(outcomes=()) if each.outcomes else each for each in requests]


class SaveStatus(IntEnum):
    """Where an output is stored; the values are the numbers on the wire."""

    NOTHING = 1
    MEMORY = 2
    DISK = 3
    DISK_REFUSED = 4


@dataclass(slots=True, eq=False)
class Saving:
    """The save status of an output.

    Attributes:
        status: `MEMORY` until the disk has stored or refused the output.
    """

    status: SaveStatus = SaveStatus.MEMORY

    def settle(self, *, is_kept: bool) -> None:
        """Set the status, once the disk has stored or refused the output."""
        self.status = SaveStatus.DISK if is_kept else SaveStatus.DISK_REFUSED


class Drafter(Protocol):
    """Drafts continuations of many sequences at once, and keeps a session for each sequence.

    Embedded drafters, remote clients and fusions of these implement this protocol. A drafter may
    also have `add_predictions` (see `EmbeddedDrafter.add_predictions`) for later predictions,
    `draft_ahead` (see `AheadDrafter`), and a true `keeps_tenants` if it keeps tenants apart.
    """

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT, /) -> None:
        """Begin a sequence.

        Args:
            session: a name that no open session has.
            prompt: int32[n], the tokens committed so far.
            options: options of the sequence. Unknown hints are ignored, but never a tenant. A
                drafter that does not keep tenants apart refuses the sequence, and a `Follower` does
                so for a drafter without `keeps_tenants`.

        Raises:
            SessionExistsError: the name is taken.
            InvalidRequestError: a token is outside the vocabulary, or an option is invalid.
            LimitExceededError: there is no room for the sequence.
        """
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return one tree for each request, in order: one call for a whole decoding step.

        Raises:
            UnknownSessionError: a session is not open.
            OutOfSequenceError: a stated length does not match; the request has no effect.
            DrafterUnavailableError: there was no answer in time. The decoding loop continues
                without drafts.
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
    """A `Drafter` that also drafts ahead, for possible outcomes of a running forward pass.

    If the pass yields one of these outcomes, its draft is ready and decoding does not wait.
    "Speculative Speculative Decoding" (arXiv:2603.03251) does this with a draft model.
    """

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float = math.inf
    ) -> list[list[DraftTree]]:
        """Commit new tokens as `draft` does; return a tree for each outcome of each request.

        Outcomes are not committed and change no state; the actual tokens are sent with a later
        request.

        Args:
            requests: requests of one decoding step; `budget_nodes` is per tree.
            timeout_s: time after which no further trees are made, in seconds.

        Returns:
            For each request, the trees of its first outcomes, in order. There may be fewer trees
            than outcomes, or none.

        Raises: the errors of `Drafter.draft`.
        """
        ...


def keeps_tenants(drafter: object) -> bool:
    """Return whether a drafter keeps the data of several tenants apart."""
    return bool(getattr(drafter, "keeps_tenants", False))


NUM_FOUND: Final = 8
"""Likely tokens per context in `Findings`, as many as in Token Recycling (arXiv:2408.08696). They
hold most of the probability mass."""

_CONTEXT: Final = np.dtype("<i8")
_TOKEN: Final = np.dtype("<i4")
_LOG_ODDS: Final = np.dtype("<f4")

FINDING_BYTES: Final = _CONTEXT.itemsize + NUM_FOUND * (_TOKEN.itemsize + _LOG_ODDS.itemsize)
"""Bytes of a context with its likely tokens, in memory, on disk and on the wire."""


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """Recycled logits: the likeliest next tokens after each context, from a model's logits.

    Attributes:
        contexts: int64[n], a number above 0 for each context, the newest context last. A context is
            the last one to three tokens.
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
        """Size of the arrays, in bytes."""
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
        """Return the findings of the wanted contexts."""
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
        """Return int64[m], the ascending positions of each context's last entry."""
        _, from_end = np.unique(self.contexts[::-1], return_index=True)
        return np.sort(len(self) - 1 - from_end)


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page of the stored findings of a model.

    Attributes:
        findings: findings of this page, newer than those of later pages.
        before: argument for requesting the next page; 0 if this is the last.
    """

    findings: Findings
    before: int = 0


class FindingsStore(Protocol):
    """Stores findings by model, in a state directory, a service, or memory."""

    def share_findings(self, model: str, findings: Findings) -> None:
        """Store findings of a model.

        Args:
            model: fingerprint of the model, in hexadecimal digits.
            findings: findings of at most `MAX_FINDINGS` contexts.

        Raises:
            RetrieverError: the findings were not stored.
        """
        ...

    def fetch_findings(self, model: str, before: int = 0) -> FoundPage:
        """Return a page of the findings of a model; pages go from newest to oldest.

        Args:
            model: fingerprint of the model.
            before: `before` of the previous page; 0 for the newest.

        Raises:
            RetrieverError: the findings are not available.
        """
        ...
