"""Turns records into documents: the text under a key, or turns of a conversation."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from indexer.build_report import BuildTally, ConversationTally
from indexer.errors import UnusableError, needing_transformers, reason_of
from indexer.sources.blocks import SourceDocument, SourceFile
from indexer.sources.chats.conversations import (
    Conversation,
    Turns,
    conversation_of,
    messages_of,
    plain_text,
    text_in,
    turns_of,
)
from indexer.sources.chats.shapes import TURN_LISTS, Shape, named
from indexer.sources.chats.streamed_answers import is_chunk
from indexer.sources.columns import listed_keys, with_fields
from indexer.sources.licences import declared_licence, licence_in
from indexer.sources.source_options import DEFAULT_FIELD, SourceOptions

_PYTHON_LIST: Final = re.compile(r"\s*\[\s*\{\s*'")


def documents_of(
    record: object, name: str, file: SourceFile, options: SourceOptions, tally: BuildTally
) -> Iterator[SourceDocument]:
    """Yield the documents in a record: its text, or the selected turns of its conversation.

    Args:
        record: a JSON object, or a row.
        name: name of the record.
        file: file that contains the record.
        options: text key, and which turns to yield.
        tally: counts conversations.

    Raises:
        UnusableError: the record has no document.
    """
    if isinstance(record, str) and file.format.is_text:
        licence = options.licence or declared_licence(record) or file.licence
        yield SourceDocument(name, licence, record)
        return
    columns = record if isinstance(record, dict) else {}
    own = licence_in(columns.get(options.licence_field)) if options.licence_field else ""
    licence = options.licence or own or file.licence
    text = text_in(record, options.field)
    if text is not None:
        yield SourceDocument(name, licence, text)
        return
    conversation = conversation_of(record, options.field)
    if conversation is None:
        raise no_conversation(record) or _without_text(record, options)
    if conversation.shape == Shape.TEXT:
        texts = [turn.text for turn in conversation.turns]
        for number, text in enumerate(texts, 1):
            yield SourceDocument(f"{name}#{number}" if len(texts) > 1 else name, licence, text)
        return
    try:
        taken = list(_texts(conversation, options))
    finally:
        is_named = options.field not in ("", DEFAULT_FIELD)
        is_missing = is_named and named(record, options.field) is None
        counted = _counted(conversation, options.turns, options.field if is_missing else "")
        tally.count_conversation(file.name, conversation.shape, counted)
    if not taken:
        raise _without_turns(conversation, columns, options.turns)
    for number, text in taken:
        yield SourceDocument(f"{name}#{number}" if number else name, licence, text)


def no_conversation(record: object) -> UnusableError | None:
    """Return why a conversation-like record has no conversation; None for any other record."""
    if not isinstance(record, Mapping):
        return None
    if is_chunk(record):
        return UnusableError(
            "piece of a streamed answer",
            "keep all pieces of an answer in one record, as a list or as text under `response`",
        )
    if "role" in record and "content" in record:
        return UnusableError(
            "turn by itself", "keep the turns of a conversation in one record, under `messages`"
        )
    return _without_turn_list(record)


def _without_turn_list(record: Mapping[str, Any]) -> UnusableError | None:
    for key in TURN_LISTS:
        value = record.get(key)
        if key in record and value is None:
            return UnusableError("empty conversation", f"its `{key}` is null")
        if isinstance(value, str) and _PYTHON_LIST.match(value):
            return UnusableError(
                "turns that are not JSON",
                f"`{key}` is a list as Python prints it: write it with json.dumps, or save the "
                "table as Parquet",
            )
    return None


def _without_text(record: object, options: SourceOptions) -> UnusableError:
    if isinstance(record, Mapping):
        is_there = options.field in record
        which = "that one is not text: name another" if is_there else "name the key of the text"
        remedy = f"its keys are {listed_keys(record)}: {which} with --field{with_fields(record)}"
    elif isinstance(record, list):
        remedy = "it is a list: name the file .json"
    else:
        remedy = "it is not an object with keys"
    return UnusableError(f"no text in field {options.field!r}", remedy)


def _texts(conversation: Conversation, options: SourceOptions) -> Iterator[tuple[int, str]]:
    """Yield the selected turns, each with its number; all turns joined have the number 0."""
    if options.turns != Turns.ALL:
        yield from turns_of(conversation, str(options.turns))
        if options.turns == Turns.ASSISTANT:
            yield from enumerate(conversation.samples, len(conversation.turns) + 1)
    elif conversation.turns:
        yield 0, _together(conversation, options)


def _together(conversation: Conversation, options: SourceOptions) -> str:
    if options.template is None:
        return plain_text(conversation.turns)
    with needing_transformers("a chat template"):
        from transformers.utils.chat_template_utils import (  # noqa: PLC0415  (takes a second)
            render_jinja_template,
        )
    special: dict[str, Any] = dict(options.template.special_tokens)
    messages: Any = [messages_of(conversation.turns)]
    try:
        rendered: Any = render_jinja_template(
            messages, chat_template=options.template.source, **special
        )
    # Templates come with models, and each template raises its own errors.
    except Exception as error:
        raise UnusableError(
            "refused by the chat template",
            f"it says: {reason_of(error)}; take single turns with --turns assistant",
        ) from error
    return str(rendered[0][0])


def _counted(conversation: Conversation, turns: Turns, missing_field: str) -> ConversationTally:
    taken = [turn for turn in conversation.turns if turns in {Turns.ALL, turn.role}]
    kind = "turns" if turns == Turns.ALL else f"{turns} turns"
    left_out = Counter(conversation.left_out)
    num_samples = len(conversation.samples) if turns == Turns.ASSISTANT else 0
    return ConversationTally(kind, 1, len(taken) + num_samples, left_out, missing_field)


def _without_turns(
    conversation: Conversation, record: Mapping[str, Any], turns: Turns
) -> UnusableError:
    if not conversation.turns:
        left_out = ", ".join(dict.fromkeys(conversation.left_out))
        said = f"; left out: {left_out}" if left_out else ""
        known = "system, user, assistant or tool"
        return UnusableError(
            "empty conversation", f"it has no turn of a role {known} with a text{said}"
        )
    roles = ", ".join(dict.fromkeys(turn.role for turn in conversation.turns))
    return UnusableError(
        f"no {turns} turn",
        f"its keys are {listed_keys(record)}, its roles {roles}: choose others with --turns, "
        "or the key of a text with --field",
    )
