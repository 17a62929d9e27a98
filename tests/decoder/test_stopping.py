import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decoder.errors import StopStringError
from decoder.stopping import (
    StoppableText,
    StopSearch,
    StopStrings,
    check_stop_strings,
    plain_text,
    special_ids,
)
from tests.decoder.decoding import (
    ScriptedDrafter,
    decoder_with,
    oracle,
    plainly,
    prompt_of,
    tiny_llama,
)
from tests.decoder.model_fixtures import STOP

LETTERS = "ab世🎉\n"


def first_match(text: str, strings: list[str]) -> tuple[int, int] | None:
    """Return start and end of the match that is complete first, the longest of those."""
    spans = [
        (end, start)
        for end in range(1, len(text) + 1)
        for start in range(end)
        if text[start:end] in strings
    ]
    end, start = min(spans, default=(0, 0))
    return (start, end) if spans else None


def certain(text: str, strings: list[str]) -> str:
    """Return the part of a text that no stop string, as far as it is there, reaches into."""
    opened = [
        at
        for at in range(len(text))
        if any(string.startswith(text[at:]) and string != text[at:] for string in strings)
    ]
    return text[: min(opened, default=len(text))]


def random_text(rng: np.random.Generator, length: int) -> str:
    return "".join(rng.choice(list(LETTERS), length))


def test_a_text_ends_where_its_first_stop_string_is_and_never_shows_a_part_of_one() -> None:
    for seed in range(60):
        for include in (False, True):
            check_stop(seed, include=include)


def check_stop(seed: int, *, include: bool) -> None:
    rng = np.random.default_rng(seed)
    text = random_text(rng, 40)
    strings = [random_text(rng, int(rng.integers(1, 6))) for _ in range(int(rng.integers(0, 4)))]
    search = StopSearch(StopStrings(strings), include=include)
    span = first_match(text, strings)
    expected = text if span is None else text[: span[1] if include else span[0]]
    shown, at = "", 0
    while at < len(text):
        size = int(rng.integers(0, 5))
        shown += search.push(text[at : at + size])
        at += size
        if search.found is None:
            assert shown == certain(text[:at], strings)
        assert expected.startswith(shown)
    assert shown + search.finish() == expected
    assert search.found == (None if span is None else text[slice(*span)])


def test_tokens_behind_the_one_that_completes_a_stop_string_are_cut(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokens = byte_tokenizer.encode("one\n世界 two")
    for chunk in range(1, len(tokens) + 1):
        text = StoppableText(byte_tokenizer, StopStrings(["two", "\n世"]))
        shown, kept = "", []
        for at in range(0, len(tokens), chunk):
            step = tokens[at : at + chunk]
            count = text.num_kept(step)
            kept.extend(step[:count])
            shown += text.take()
            if count is not None:
                break
        assert shown + text.finish() == "one"
        assert byte_tokenizer.decode(kept) == "one\n世"
        assert text.found == "\n世"


def test_a_stop_rule_ends_the_sequence_and_the_session_within_a_path(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    truth = plainly(model, prompt, 30)
    whole = plain_text(byte_tokenizer, truth)
    for at in (1, 4, 7, 11, 16):
        stop = whole[at : at + 2]
        text = StoppableText(byte_tokenizer, StopStrings([stop]))
        drafter = ScriptedDrafter(oracle(prompt + truth))
        generation = decoder_with(model, drafter).generate(prompt, 30, stop_rule=text)
        tokens = [token for step in generation for token in step]
        assert tokens == truth[: len(tokens)]
        assert text.take() + text.finish() == whole[: whole.index(stop)]
        assert stop not in plain_text(byte_tokenizer, tokens[:-1])
        assert drafter.closed == [prompt + tokens]
        assert generation.statistics.num_tokens == len(tokens)


@pytest.mark.parametrize("string", ["", "\udcff", "a\ufffd"])
def test_stop_strings_that_are_no_text_are_refused(string: str) -> None:
    with pytest.raises(StopStringError):
        StopStrings(["fine", string])


def test_one_stop_string_may_come_by_itself() -> None:
    assert StopStrings("END").strings == ("END",)
    with pytest.raises(StopStringError, match="empty"):
        StopStrings("")
    with pytest.raises(StopStringError, match="3 is not text"):
        StopStrings([3])  # type: ignore[list-item]


def test_stop_strings_that_no_token_can_write_are_refused(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    check_stop_strings(StopStrings([*LETTERS, "a世\n"]), byte_tokenizer)
    words = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0, "so": 1, "on": 2}, "[UNK]")),
        unk_token="[UNK]",  # noqa: S106  not a password
    )
    check_stop_strings(StopStrings(["so", "on", "n o"]), words)
    with pytest.raises(StopStringError, match=r"'soon!' can never occur: .* '!'"):
        check_stop_strings(StopStrings(["so", "soon!"]), words)


def test_a_special_token_is_a_stop_string_by_its_id(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert special_ids(StopStrings(["a", STOP]), byte_tokenizer) == [0]
