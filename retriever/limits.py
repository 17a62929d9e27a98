"""Limits on what a drafter accepts, and checks of all input from outside."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retriever.errors import InvalidRequestError, LimitExceededError

MAX_NAME_BYTES: Final = 256
"""Longest name of a session or tenant, in bytes. A UUID or a path fits, and database keys of the
log stay below LMDB's limit of 511 bytes."""

DEFAULT_DOCUMENTS: Final = 3
"""Number of documents returned for a node of a draft by default."""

MAX_DOCUMENTS: Final = 64
"""Most documents returned for a node of a draft: each costs a search on disk."""

MAX_CONSTRAINT_BYTES: Final = 256 << 10
"""Longest schema, regular expression or list of choices, in bytes. A schema of 3,000 keys took a
second and about 40 MB to compile."""

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Longest message in either direction, in bytes; a prompt of a million tokens fits."""

DEFAULT_RECYCLED_BYTES: Final = 20 << 20
"""Size of the recycled logits stored for each tenant, in bytes."""

Durability = Literal["process", "disk"]
"""Failures that an acknowledged output survives: a kill of the process, or also a power failure."""

DEFAULT_DURABILITY: Final[Durability] = "process"

MAX_FINGERPRINT: Final = 128
"""Longest fingerprint of a tokenizer, in hexadecimal digits: SHA-512 fits."""

_FINGERPRINT: Final = re.compile(rf"[0-9a-fA-F]{{1,{MAX_FINGERPRINT}}}")
_SHOWN: Final = 64  # most characters of a caller's name in a message
_BEYOND: Final = (1 << 31) - 1  # bound of token ids if the vocabulary is unknown
_FEW: Final = 64
_TOKEN: Final = np.dtype(np.int32)
_NO_INTEGERS: Final = np.empty(0, np.int32)


def _limit(  # noqa: PLR0913  (what is stated of a limit)
    default: float,
    said: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    changes: bool = False,
) -> Any:
    """Return the field of a limit, which is also a setting of a service.

    Args:
        default: default value.
        said: description, which is the help text of its flag.
        least: smallest value.
        above: exclusive lower bound of its values.
        most: largest value.
        changes: whether it can change while a service runs, because it is read for each request.
            The other limits apply only when an object is made: a pool, the log, a server, or the
            memory for trees.
    """
    bounds = {"ge": least, "gt": above, "le": most}
    stated = {name: bound for name, bound in bounds.items() if bound is not None}
    return field(default=default, metadata={"said": said, "bounds": stated, "changes": changes})


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of a drafter. Times are in seconds.

    An engine sends a few calls at once, and each holds its message of up to `max_message_bytes`.
    `max_tenant_waiting` also bounds the jobs that wait in each worker pool. A step takes seconds at
    most, so only sequences that an engine suspends for longer than `idle_eviction_s` may have to be
    opened again.
    """

    max_sessions: int = _limit(4096, "Most sessions open at once.", least=1, changes=True)
    max_tenant_sessions: int = _limit(2048, "Most sessions of one tenant.", least=1, changes=True)
    idle_session_s: float = _limit(
        600.0, "A session idle for longer than this ends, in seconds.", least=0, changes=True
    )
    idle_eviction_s: float = _limit(
        60.0,
        "A session idle for longer than this ends if another one needs its room, in seconds.",
        least=0,
        changes=True,
    )
    max_sequence_tokens: int = _limit(
        1 << 20, "Most tokens in one sequence, prompt included.", least=1, changes=True
    )
    max_bytes: int = _limit(
        0,
        "Most memory that sessions, contexts and outputs take, in bytes; 0: half of the memory "
        "that the process may use.",
        least=0,
        changes=True,
    )
    max_tenant_bytes: int = _limit(
        0, "Most memory of one tenant, in bytes; 0: half of --max-bytes.", least=0, changes=True
    )
    max_budget_nodes: int = _limit(256, "Most nodes in one draft tree.", least=1, most=4096)
    max_batch: int = _limit(1024, "Most sequences in one decoding step.", least=1, changes=True)
    max_step_nodes: int = _limit(
        1 << 16, "Most nodes that one step may ask for.", least=1, changes=True
    )
    max_message_bytes: int = _limit(
        MAX_MESSAGE_BYTES,
        "Longest message that is read, in bytes.",
        least=1024,
        most=(1 << 31) - 1,
    )
    generations_tokens: int = _limit(
        1 << 20,
        "Generations to keep, in tokens of 24 bytes (36 without an index); rounded up to a power "
        "of two.",
        least=1024,
        most=1 << 30,
    )
    generations_age_s: float = _limit(
        math.inf, "Forget outputs that are older than this, in seconds.", least=1
    )
    recycled_bytes: int = _limit(
        DEFAULT_RECYCLED_BYTES,
        "Recycled logits to store for each tenant and share among its decoders, in bytes; the "
        "default holds the whole table of a decoder; 0: nothing.",
        least=0,
    )
    max_tenants: int = _limit(
        256, "Most tenants whose outputs are in memory at once.", least=1, changes=True
    )
    max_tenant_deletions: int = _limit(
        60, "Most calls of one tenant that delete data, in a minute.", least=1, changes=True
    )
    max_tenant_waiting: int = _limit(
        256,
        "Most concurrent calls of one tenant, not counting streams.",
        least=1,
        changes=True,
    )
    max_tenant_work: float = _limit(
        math.inf,
        "Most work of one tenant per second, in nodes. Each sequence of a step counts as 16 nodes "
        "more, and 8 tokens that are read count as one node.",
        above=0,
        changes=True,
    )


CHANGEABLE_LIMITS: Final = frozenset(
    each.name for each in fields(Limits) if each.metadata["changes"]
)
"""Limits that can change while a service runs."""


def checked_tokens(tokens: ArrayLike, vocabulary_size: int | None) -> NDArray[np.int32]:
    """Check that every id is inside the vocabulary; return int32[n].

    Args:
        tokens: integers in one dimension.
        vocabulary_size: ids must be below it; None if unknown.

    Raises:
        InvalidRequestError: an id is outside the vocabulary, or `tokens` are not integers in one
            dimension.
    """
    array = _integers(tokens)
    # For the few tokens of a step, a loop in Python is faster than calls of numpy.
    ids = array.tolist() if array.size <= _FEW else [int(array.min()), int(array.max())]
    _check_ids(ids, vocabulary_size)
    return array.astype(_TOKEN)  # a copy: the caller's array may change


def checked_ids(tokens: ArrayLike, vocabulary_size: int | None) -> list[int]:
    """Do as `checked_tokens` does, but return a list, which is faster for few tokens.

    Raises:
        InvalidRequestError: an id is outside the vocabulary, or `tokens` are not integers in one
            dimension.
    """
    ids: list[int] = _integers(tokens).tolist()
    _check_ids(ids, vocabulary_size)
    return ids


def _integers(tokens: ArrayLike) -> NDArray[Any]:
    array = np.asarray(tokens)
    if array.ndim == 1 and array.dtype.kind in "iu":
        return array
    if array.size == 0:
        return _NO_INTEGERS
    raise InvalidRequestError("token ids must be integers in one dimension")


def _check_ids(ids: Sequence[int], vocabulary_size: int | None) -> None:
    highest = vocabulary_size if vocabulary_size is not None else _BEYOND
    for token in ids:
        if not 0 <= token < highest:
            least = min(ids)
            wrong = least if least < 0 else max(ids)
            if vocabulary_size is None:
                raise InvalidRequestError(
                    f"{wrong} is not a token id: ids begin at 0 and fit into four signed bytes"
                )
            raise InvalidRequestError(
                f"token id {wrong} is outside the vocabulary of {highest}: the tokenizer at hand "
                "is not the one that is drafted for"
            )


def check_session_name(session: str) -> None:
    """Refuse an invalid session name.

    Raises:
        InvalidRequestError: the name is empty or too long.
    """
    if not 0 < len(_encoded(session)) <= MAX_NAME_BYTES:
        raise InvalidRequestError(f"a session's name has 1 to {MAX_NAME_BYTES} bytes")


def check_group_name(group: str) -> None:
    """Refuse an invalid name of a group.

    Raises:
        InvalidRequestError: the name is too long, or cannot be encoded.
    """
    if not isinstance(group, str) or len(_encoded(group)) > MAX_NAME_BYTES:
        raise InvalidRequestError(f"a group's name is a text of at most {MAX_NAME_BYTES} bytes")


def check_tenant_name(tenant: str) -> None:
    """Refuse an invalid tenant name; the empty name is for callers without a tenant.

    Names are written to logs, and operators use them as names of folders.

    Raises:
        InvalidRequestError: the name is too long, cannot be encoded, is not printable, or has parts
            between slashes that are empty, "." or "..".
    """
    if len(_encoded(tenant)) > MAX_NAME_BYTES:
        raise InvalidRequestError(f"a tenant's name has at most {MAX_NAME_BYTES} bytes")
    parts = tenant.replace("\\", "/").split("/")
    if tenant and (not tenant.isprintable() or not {"", ".", ".."}.isdisjoint(parts)):
        raise InvalidRequestError(
            f"{tenant!r} cannot be a tenant's name: leave out control characters and line breaks, "
            "and parts of a path such as .. and //"
        )


def _encoded(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name!r} cannot be a name: {error.reason}") from error


def checked_fingerprint(fingerprint: str) -> str:
    """Return a valid fingerprint of a tokenizer in lower case; it is stored and shown to others.

    Raises:
        InvalidRequestError: the fingerprint is not hexadecimal, or is too long.
    """
    if _FINGERPRINT.fullmatch(fingerprint) is None:
        raise InvalidRequestError(
            f"a vocabulary's fingerprint has 1 to {MAX_FINGERPRINT} hexadecimal digits"
        )
    return fingerprint.lower()


MAX_FINDINGS: Final = 4096
"""Most contexts in one `Findings`: 295 KB. That is one message and one record on disk, and takes a
millisecond to process."""

MAX_LOG_ODDS: Final = 16.0
"""Largest absolute log-odds of a token; those of recycled logits stay within 7."""


def check_findings(
    contexts: NDArray[np.int64],
    tokens: NDArray[np.int32],
    log_odds: NDArray[np.float32],
    vocabulary_size: int | None,
) -> None:
    """Refuse invalid findings of a model; see `retriever.drafter.Findings`.

    Their correctness cannot be checked: wrong findings degrade drafts but never change an output.

    Args:
        contexts: int64[n].
        tokens: int32[n, k].
        log_odds: float32[n, k].
        vocabulary_size: ids must be below it; None if unknown.

    Raises:
        InvalidRequestError: a number is out of its range, or there are too many contexts.
    """
    check_num_findings(len(contexts))
    if len(contexts) and int(contexts.min()) <= 0:
        raise InvalidRequestError("contexts of findings are numbers above 0")
    if tokens.size:
        _check_ids([int(tokens.min()), int(tokens.max())], vocabulary_size)
    if not bool((np.abs(log_odds) <= MAX_LOG_ODDS).all()):  # also refuses NaN
        raise InvalidRequestError(
            f"log-odds of findings lie between {-MAX_LOG_ODDS:g} and {MAX_LOG_ODDS:g}"
        )


def check_num_findings(count: int) -> None:
    """Refuse too many contexts at once.

    Raises:
        InvalidRequestError: there are more than `MAX_FINDINGS` contexts.
    """
    if count > MAX_FINDINGS:
        raise InvalidRequestError(
            f"findings of {count} contexts are too many at once: send at most {MAX_FINDINGS}"
        )


def check_model(fingerprint: str) -> None:
    """Refuse an invalid fingerprint of a model, because it is stored.

    Raises:
        InvalidRequestError: the fingerprint is not hexadecimal, or is too long.
    """
    if _FINGERPRINT.fullmatch(fingerprint) is None:
        raise InvalidRequestError(
            f"a model's fingerprint has 1 to {MAX_FINGERPRINT} hexadecimal digits"
        )


def shown(name: str) -> str:
    """Return a name for error messages: escaped, in one line, shortened."""
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}\u2026")


def check_length(num_tokens: int, limits: Limits) -> None:
    """Refuse sequences that are too long.

    Raises:
        LimitExceededError: the sequence would have more than `max_sequence_tokens` tokens.
    """
    if num_tokens > limits.max_sequence_tokens:
        raise LimitExceededError(
            f"a sequence of {num_tokens} tokens is beyond the limit of "
            f"{limits.max_sequence_tokens} (max_sequence_tokens)",
            limit="max_sequence_tokens",
        )


def check_draft(budget_nodes: int, min_probability: float, limits: Limits) -> None:
    """Refuse invalid budgets and thresholds.

    Raises:
        InvalidRequestError: the budget is below 0, or the probability is outside 0 to 1.
        LimitExceededError: the budget is above `max_budget_nodes`.
    """
    if budget_nodes < 0:
        raise InvalidRequestError(f"a budget of {budget_nodes} nodes is negative")
    if budget_nodes > limits.max_budget_nodes:
        raise LimitExceededError(
            f"a budget of {budget_nodes} nodes is beyond the limit of "
            f"{limits.max_budget_nodes} (max_budget_nodes)",
            limit="max_budget_nodes",
        )
    if not 0.0 <= min_probability <= 1.0:
        raise InvalidRequestError(f"min_probability must lie between 0 and 1: {min_probability}")


MAX_OUTCOMES: Final = 64
"""Most outcomes of a sequence in a request for drafts ahead. About as many drafts can be made
during a pass of a few milliseconds."""


def check_outcomes(lengths: Sequence[int], limits: Limits) -> None:
    """Refuse outcomes that are too many, too long or empty.

    Args:
        lengths: lengths of the outcomes, in tokens.
        limits: the limits in force.

    Raises:
        InvalidRequestError: an outcome has no tokens.
        LimitExceededError: there are more than `MAX_OUTCOMES`, or an outcome has more than
            `max_budget_nodes` + 1 tokens: one more than the longest path in a tree.
    """
    if len(lengths) > MAX_OUTCOMES:
        raise LimitExceededError(
            f"{len(lengths)} outcomes of a sequence are beyond the limit of {MAX_OUTCOMES} "
            "(MAX_OUTCOMES)",
            limit="max_outcomes",
        )
    if min(lengths, default=1) == 0:
        raise InvalidRequestError("an outcome has at least one token")
    longest = limits.max_budget_nodes + 1
    if max(lengths, default=0) > longest:
        raise LimitExceededError(
            f"an outcome of {max(lengths)} tokens is beyond the limit of {longest}, a token more "
            "than a tree has nodes (max_budget_nodes)",
            limit="max_budget_nodes",
        )


MAX_PREDICTIONS: Final = 64
"""Most predictions of a session. Each draft reads the cursor of every prediction."""


_MOST_SENT: Final = 1024


def check_num_sent(count: int) -> None:
    """Refuse a message with too many predictions, even if they are repeated.

    Raises:
        LimitExceededError: there are too many predictions.
    """
    if count > _MOST_SENT:
        raise LimitExceededError(
            f"{count} predictions in one message are beyond the limit of {_MOST_SENT}, and a "
            f"session has at most {MAX_PREDICTIONS}: send each once (MAX_PREDICTIONS)",
            limit="max_predictions",
        )


def check_predictions(lengths: Sequence[int], limits: Limits) -> None:
    """Refuse predictions that are too many or too long in total.

    Args:
        lengths: lengths of all predictions of a session, in tokens.
        limits: the limits in force.

    Raises:
        LimitExceededError: there are more than `MAX_PREDICTIONS`, or more than
            `max_sequence_tokens` tokens in total.
    """
    if len(lengths) > MAX_PREDICTIONS:
        raise LimitExceededError(
            f"{len(lengths)} predictions of a session are beyond the limit of {MAX_PREDICTIONS} "
            "(MAX_PREDICTIONS)",
            limit="max_predictions",
        )
    if sum(lengths) > limits.max_sequence_tokens:
        raise LimitExceededError(
            f"predictions of {sum(lengths)} tokens are beyond the limit of "
            f"{limits.max_sequence_tokens} for one session (max_sequence_tokens)",
            limit="max_sequence_tokens",
        )


def check_documents(max_documents: int) -> None:
    """Refuse an invalid number of documents for a node.

    Raises:
        InvalidRequestError: the number is below 0.
        LimitExceededError: the number is above `MAX_DOCUMENTS`.
    """
    if max_documents < 0:
        raise InvalidRequestError(f"{max_documents} documents a node is a negative number")
    if max_documents > MAX_DOCUMENTS:
        raise LimitExceededError(
            f"{max_documents} documents a node are beyond the limit of {MAX_DOCUMENTS} "
            "(MAX_DOCUMENTS)",
            limit="max_documents",
        )


RETRY_S: Final = 5.0
"""Retry delay in a refusal for lack of memory, in seconds: sessions may end in that time."""

MAPPED_BYTES: Final = 1 << 18
"""Size in bytes above which a block of tokens is mapped individually, so that its memory returns to
the system when it is freed."""


def out_of_memory() -> LimitExceededError:
    """Return the refusal for when the system runs out of memory before a limit is reached."""
    return LimitExceededError(
        f"the service's machine has no memory left: try again in {RETRY_S:g} s, or ask its "
        "operator to lower its ceiling (max_bytes)",
        limit="max_bytes",
        retry_after_s=RETRY_S,
    )


def check_memory(num_bytes: int) -> None:
    """Refuse work that needs `num_bytes` at once if the system has less memory left.

    This is for libraries that end the process if an allocation fails.

    Raises:
        LimitExceededError: the system has less memory left.
    """
    try:
        np.empty(num_bytes, np.uint8)  # uses no memory pages
    except MemoryError as error:
        raise out_of_memory() from error
