"""Streamers hear the same from drafted generation as from plain."""

from threading import Thread
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from decoder.model.pretrained import ModelOptions, load_model
from tests.decoder.decoding import ScriptedDrafter, oracle, plainly, prompt_of, tiny_llama
from tests.decoder.engines.transformers.generating import (
    NEW_TOKENS,
    EndsAfter,
    foredraft,
    generated,
)


class Listener(BaseStreamer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.told.append(value.tolist())

    def end(self) -> None:
        self.told.append("end")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_streamer_is_told_the_prompt_each_token_and_the_end(*, is_stopped: bool) -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    truth = plainly(model, prompt, NEW_TOKENS)
    stop = {"stopping_criteria": StoppingCriteriaList([EndsAfter(truth[9])])} if is_stopped else {}
    plain, drafted = Listener(), Listener()
    expected = generated(model, prompt, streamer=plain, **stop)
    drafter = ScriptedDrafter(oracle(expected[0].tolist()))
    plugin = foredraft(model, drafter)
    output = generated(model, prompt, streamer=drafted, custom_generate=plugin, **stop)
    assert output.tolist() == expected.tolist()
    assert drafted.told == plain.told
    assert drafted.told[0] == [prompt]
    assert drafted.told[-1] == "end"


def test_text_streams_as_it_does_without_drafts(
    model_directory: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    language_model = load_model(ModelOptions(str(model_directory)))
    model, tokenizer = language_model.model, language_model.tokenizer
    prompt = tokenizer.encode("one two three one two")
    truth = generated(model, prompt, streamer=TextStreamer(tokenizer))[0].tolist()
    expected = capsys.readouterr().out
    plugin = foredraft(model, ScriptedDrafter(oracle(truth)))
    generated(model, prompt, streamer=TextStreamer(tokenizer), custom_generate=plugin)
    assert capsys.readouterr().out == expected != ""


def test_a_reader_in_another_thread_hears_the_end(
    model_directory: Any, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = load_model(ModelOptions(str(model_directory))).model
    prompt = byte_tokenizer.encode("one two")
    truth = generated(model, prompt)[0].tolist()
    streamer = TextIteratorStreamer(byte_tokenizer, skip_prompt=True, timeout=20)
    options = {"custom_generate": foredraft(model, ScriptedDrafter(oracle(truth)))}
    thread = Thread(
        target=generated, args=(model, prompt), kwargs={"streamer": streamer, **options}
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == byte_tokenizer.decode(truth[len(prompt) :])
