"""Reads conversations: who said what, and the prompts and outputs of models.

`shapes` finds the conversation in a record, and `dialects` reads its turns.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from indexer.sources.blocks import HALF_CHARACTER, whole_characters
from indexer.sources.chats.dialects import (
    Part,
    are_turns,
    bare,
    content_parts,
    decoded,
    is_item,
    is_list,
    item_parts,
    may_be_turn,
    named_role,
    role_of,
    turn_parts,
)
from indexer.sources.chats.shapes import (
    BATCHES,
    OUTPUTS,
    Found,
    Shape,
    found_in,
)
from indexer.sources.chats.streamed_answers import whole_answer

TEXT: Final = "text"
"""The role of a text that is not part of a conversation."""


class Turns(StrEnum):
    """The turns of a conversation to read."""

    ASSISTANT = "assistant"
    USER = "user"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation.

    Attributes:
        role: `system`, `user`, `assistant` or `tool`; other names for these roles are translated.
            It is `text` if a field names a text whose author is unknown.
        text: content of the turn, never empty. Line breaks join several parts, such as texts and
            tool calls. A tool call is a JSON object with `name` and `arguments`.
    """

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that was read from a record.

    Attributes:
        shape: name of the record's shape.
        turns: turns in order; may be empty.
        left_out: parts of the record that are in no turn, each as a noun: `image`, `empty turn`.
        num_given: number of turns that the model was given, if the record says so. An answer among
            these turns is part of a prompt, because a server gets the whole conversation with each
            request.
        samples: alternative answers to the last turn's prompt.
    """

    shape: str
    turns: tuple[Turn, ...]
    left_out: tuple[str, ...] = ()
    num_given: int = 0
    samples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exchange:
    """A model's prompt and its output.

    Attributes:
        prompt: all earlier turns; may be empty.
        output: text of an assistant turn.
        num_samples: number of answers to this prompt in the record, including this output.
    """

    prompt: tuple[Turn, ...]
    output: str
    num_samples: int = 1


_NO_ANSWER: Final = "response without an answer"
_MAX_DEPTH: Final = 3
"""Nesting levels of an answer: a response, its choices, a choice, and its content."""


def conversation_of(record: object, field: str = "") -> Conversation | None:
    """Return the conversation in a record, or None if the record's shape is unknown.

    Unknown keys are ignored. Tables often store a list or object as its JSON text, which is decoded
    here.

    Args:
        record: a JSON object, a list of turns, or a row as a mapping of columns to values.
        field: key or JMESPath expression that names texts or turns in the record.
    """
    text = text_in(record, field)
    if text is not None:
        return Conversation(Shape.TEXT, (Turn(TEXT, text),))
    found = found_in(record, field)
    return _Reading(found).conversation() if found is not None else None


def text_in(record: object, field: str) -> str | None:
    """Return the text under a key of a record, the most common case in a corpus; otherwise None."""
    text = record.get(field) if isinstance(record, dict) else None
    return text if isinstance(text, str) and not text.startswith("[") else None


def turns_of(conversation: Conversation, role: str) -> Iterator[tuple[int, str]]:
    """Yield the number, counted from 1, and the text of every turn with a role."""
    for number, turn in enumerate(conversation.turns, 1):
        if turn.role == role:
            yield number, turn.text


def exchanges_of(conversation: Conversation) -> Iterator[Exchange]:
    """Yield each assistant turn that is an output, with all earlier turns as its prompt."""
    last = len(conversation.turns)
    for _, text in turns_of(conversation, TEXT):
        if text and not text.isspace():
            yield Exchange((), whole_characters(text))
    for number, text in turns_of(conversation, "assistant"):
        if number > conversation.num_given:
            before = conversation.turns[: number - 1]
            # In a list of answers without prompts, an answer is not the prompt of the next one.
            prompt = before if any(turn.role != "assistant" for turn in before) else ()
            samples = conversation.samples if number == last else ()
            for output in (text, *samples):
                yield Exchange(prompt, output, 1 + len(samples))


def prompts_of(conversation: Conversation) -> Iterator[tuple[Turn, ...]]:
    """Yield a model's prompts: the turns before each output, and all turns if no answer ends them.

    Turns without a user turn are not a prompt.
    """
    # All samples of an answer have the same prompt.
    prompts = [*dict.fromkeys(exchange.prompt for exchange in exchanges_of(conversation))]
    if conversation.shape == Shape.TEXT:
        prompts = [(Turn("user", each.output),) for each in exchanges_of(conversation)]
    elif conversation.turns and conversation.turns[-1].role != "assistant":
        prompts.append(conversation.turns)
    return (prompt for prompt in prompts if any(turn.role == "user" for turn in prompt))


def plain_text(turns: tuple[Turn, ...]) -> str:
    """Return the texts of turns, separated by empty lines."""
    return "\n\n".join(turn.text for turn in turns)


def messages_of(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    """Return turns as messages, the form that chat templates expect."""
    return [{"role": turn.role, "content": turn.text} for turn in turns]


class _Reading:
    """Collects the turns of a conversation, and what was left out."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._turns: list[Turn] = []
        self._left_out = list(found.left_out)
        self._samples: list[str] = []
        self._num_given = 0

    def conversation(self) -> Conversation:
        """Return the finished conversation."""
        found = self._found
        if found.shape == Shape.TEXT:
            return Conversation(found.shape, tuple(Turn(TEXT, text) for text in found.given))
        self._add_system()
        for pair in found.history:
            if is_list(pair) and len(pair) == 2:  # noqa: PLR2004
                self._add_side(pair[0], "user")
                self._add_side(pair[1], "assistant")
        if found.has_turns:
            self._add_turns(found.given, "")
        elif found.given is not None:
            self._add_side(found.given, "user")
        is_repeated = found.may_repeat and self._turns and self._turns[-1].role == "assistant"
        if found.answers is not None and not is_repeated:
            self._num_given = len(self._turns)
            self._add_samples(found.answers)
        return Conversation(
            found.shape,
            tuple(self._turns),
            tuple(self._left_out),
            self._num_given,
            tuple(self._samples),
        )

    def _add_system(self) -> None:
        given = self._found.given
        first = given[0] if is_list(given) and given else None
        if isinstance(first, dict) and role_of(first) == "system":
            return
        for content in self._found.system:
            parts = list(content_parts(content))
            if any(kind == Part.SAID and text.strip() for kind, text in parts):
                self._add_parts(parts, "system")
                return

    def _add_samples(self, answers: Sequence[Any], depth: int = 0) -> None:
        """Add the first of several answers to a prompt, and store the others as samples."""
        first = len(self._turns)
        for answer in answers:
            begin = len(self._turns)
            self._add_answer(answer, depth)
            if begin > first:
                self._samples += [turn.text for turn in self._turns[begin:]]
                del self._turns[begin:]

    def _add_answer(self, value: Any, depth: int = 0) -> None:
        """Add a response, in any form: its choices, items, message, content or text."""
        value, num_damaged = whole_answer(value)
        self._left_out += ["piece of a stream that is not JSON"] * num_damaged
        if not isinstance(value, dict):
            self._add_side(value, "assistant")
        elif depth > _MAX_DEPTH:
            self._left_out.append(_NO_ANSWER)
        elif batch := next((key for key in BATCHES if is_list(decoded(value.get(key)))), ""):
            choices = [each for each in decoded(value[batch]) if isinstance(each, dict)]
            self._add_samples([_chosen(each) for each in choices], depth + 1)
            self._left_out += [] if choices else [_NO_ANSWER]
        elif isinstance(value.get("message"), dict):
            self._add_turn(value["message"], "assistant")
        elif "role" in value or "content" in value:
            self._add_turn(value, "assistant")
        elif key := next((each for each in OUTPUTS if value.get(each)), ""):
            self._add_answer(value[key], depth + 1)
        elif any(isinstance(value.get(key), str | list) for key in ("text", "value", "parts")):
            self._add_parts(content_parts(value), "assistant")
        else:
            self._left_out.append(_NO_ANSWER)

    def _add_side(self, value: Any, role: str) -> None:
        """Add one side of an exchange: a text, a message, or a list of texts and messages."""
        if are_turns(value):
            self._add_turns(decoded(value), role)
        elif isinstance(value, dict) and may_be_turn(value):
            self._add_turn(value, role)
        elif is_list(value) and any(isinstance(each, int) for each in value):
            self._left_out.append("text that is stored as token ids")
        else:
            self._add_parts(content_parts(value), role)

    def _add_turns(self, items: list[Any], role: str) -> None:
        was_item = False
        for item in items:
            if not isinstance(item, dict):
                self._left_out.append("turn that is not an object")
                continue
            before = len(self._turns)
            is_bare_item = is_item(item) and not named_role(item)
            if is_bare_item and item["type"] != "message":
                self._add_parts(item_parts(item), "assistant", may_be_empty=True)
            else:
                self._add_turn(item, role)
            if is_bare_item or was_item:
                self._join_answers(before)
            was_item = is_bare_item

    def _join_answers(self, before: int) -> None:
        """Join an added turn with the previous one if a model wrote both as one turn."""
        last = self._turns[before - 1 :] if before else []
        if len(last) == 2 and {turn.role for turn in last} == {"assistant"}:  # noqa: PLR2004
            self._turns[before - 1 :] = [Turn("assistant", f"{last[0].text}\n{last[1].text}")]

    def _add_turn(self, item: Mapping[str, Any], role: str) -> None:
        item = bare(item)
        known = role_of(item, role)
        if known is not None:
            self._add_parts(turn_parts(item, known), known)
        elif name := named_role(item) or role:
            self._left_out.append(f"turn of unknown role {name!r}")
        else:
            self._left_out.append("turn without role")

    def _add_parts(
        self, parts: Iterable[tuple[Part, str]], role: str, *, may_be_empty: bool = False
    ) -> None:
        """Add one speaker's parts as a turn; tool results between them become separate turns."""
        texts: list[str] = []
        for kind, text in parts:
            if kind == Part.LEFT_OUT:
                self._left_out.append(text)
            elif kind == Part.SAID or role == "tool":
                texts.append(text)
            else:
                if texts:
                    self._add_text(role, texts)
                self._add_text("tool", [text])
                texts, may_be_empty = [], True
        if texts or not may_be_empty:
            self._add_text(role, texts)

    def _add_text(self, role: str, texts: list[str]) -> None:
        text = "\n".join(texts)
        if not text.isascii() and (whole := whole_characters(text)) != text:
            self._left_out.append(HALF_CHARACTER)
            text = whole
        if text and not text.isspace():
            self._turns.append(Turn(role, text))
        else:
            self._left_out.append("empty turn")


def _chosen(choice: Mapping[str, Any]) -> Any:
    """Return the content of a choice or candidate: a message, a text, a content, or itself."""
    found = next((choice[key] for key in ("message", "text") if choice.get(key)), None)
    content = choice.get("content")  # a text belongs to a message, which may have more parts
    return found or (content if isinstance(content, dict) else choice)
