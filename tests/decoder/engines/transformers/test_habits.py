"""What people do around `generate`: with drafts it gives what it gives without, or says why not."""

import asyncio
import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import Any, Final

import pytest
import torch
from accelerate import Accelerator, cpu_offload, dispatch_model
from torch import nn
from transformers import (
    AsyncTextIteratorStreamer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TextGenerationPipeline,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from decoder.engines.transformers.custom_generate import Foredraft
from decoder.errors import DecoderBusyError, UnsupportedGenerationError, UnsupportedModelError
from tests.decoder.decoding import ScriptedDrafter, at_random, nothing, prompt_of
from tests.decoder.engines.transformers.batched import PROMPTS, foredraft, padded
from tests.decoder.engines.transformers.live.model_changes import tiny

NEW_TOKENS: Final = 10
PROMPT: Final = torch.tensor([prompt_of(24, vocabulary=250)])
BATCH: Final = padded(PROMPTS)

Way = dict[str, Any]
Habit = Callable[[Any, Way], Any]
"""Generates with a model by its own `generate`, given arguments besides; returns any value."""


def generated(model: Any, way: Way, *args: Any, **options: Any) -> Any:
    given = {} if args or "input_ids" in options or "inputs" in options else {"input_ids": PROMPT}
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    return model.generate(*args, **{**defaults, **given, **options, **way})


def as_it_is(model: Any, way: Way) -> Any:
    return generated(model, way)


def positionally(model: Any, way: Way) -> Any:
    return generated(model, way, PROMPT)


def by_name(model: Any, way: Way) -> Any:
    return generated(model, way, inputs=PROMPT)


def by_32_bits(model: Any, way: Way) -> Any:
    return generated(model, way, PROMPT.int())


def with_a_configuration(model: Any, way: Way) -> Any:
    config = GenerationConfig(max_new_tokens=7, repetition_penalty=1.2, pad_token_id=0)  # type: ignore[no-untyped-call]
    return model.generate(PROMPT, generation_config=config, **way)


def with_the_models_configuration(model: Any, way: Way) -> Any:
    model.generation_config.update(max_new_tokens=6, pad_token_id=0, no_repeat_ngram_size=2)
    return model.generate(PROMPT, **way)


def without_a_cache(model: Any, way: Way) -> Any:
    return generated(model, way, use_cache=False)


def by_several_lengths(model: Any, way: Way) -> Any:
    return [generated(model, way, PROMPT[:, :length]).tolist() for length in (1, 2, 20)]


def in_a_batch(model: Any, way: Way) -> Any:
    return generated(model, way, **BATCH)


def in_a_batch_without_a_mask(model: Any, way: Way) -> Any:
    """Transformers then takes what equals `pad_token_id` for padding."""
    return generated(model, way, BATCH["input_ids"])


def in_a_batch_of_equal_lengths(model: Any, way: Way) -> Any:
    return generated(model, way, PROMPT.reshape(4, 6))


def in_a_batch_that_ends_early(model: Any, way: Way) -> Any:
    return generated(model, way, **BATCH, eos_token_id=list(range(0, 300, 7)))


def several_samples(model: Any, way: Way) -> Any:
    return generated(model, way, **BATCH, do_sample=True, top_k=1, num_return_sequences=2)


def with_bias(model: Any, way: Way) -> Any:
    return generated(model, way, **BATCH, sequence_bias=[[[5], 4.0]], min_new_tokens=9)


def in_training_mode(model: Any, way: Way) -> Any:
    model.train()
    return generated(model, way)


def in_inference_mode(model: Any, way: Way) -> Any:
    with torch.inference_mode():
        return generated(model, way).clone()


def with_gradients(model: Any, way: Way) -> Any:
    with torch.enable_grad():
        return generated(model, way)


def on_eager_attention(model: Any, way: Way) -> Any:
    model.set_attn_implementation("eager")
    return generated(model, way)


def compiled(model: Any, way: Way) -> Any:
    return generated(torch.compile(model, backend="eager"), way)


def of_a_compiled_layer(model: Any, way: Way) -> Any:
    model.model.layers[1].mlp.compile(backend="eager", dynamic=True)
    return generated(model, way, max_new_tokens=3)


def prepared_by_accelerate(model: Any, way: Way) -> Any:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    return generated(accelerator.unwrap_model(prepared), way)


def dispatched(model: Any, way: Way) -> Any:
    return generated(dispatch_model(model, device_map={"": "cpu"}, force_hooks=True), way)


def offloaded(model: Any, way: Way) -> Any:
    if not hasattr(model, "_hf_hook"):
        cpu_offload(model, execution_device=torch.device("cpu"))
    return generated(model, way)


def in_parallel_data(model: Any, way: Way) -> Any:
    return generated(nn.DataParallel(model).module, way)


class Wrapping(nn.Module):
    """A user's own: it holds a model, and something else."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.lm = nn.LayerNorm(4), model

    def generate(self, *args: Any, **options: Any) -> Any:
        return self.lm.generate(*args, **options)


def inside_a_module(model: Any, way: Way) -> Any:
    return generated(Wrapping(model), way)


def in_a_thread(model: Any, way: Way) -> Any:
    found: list[Any] = []
    thread = Thread(target=lambda: found.append(generated(model, way)))
    thread.start()
    thread.join()
    return found[0]


def in_a_task(model: Any, way: Way) -> Any:
    async def awaited() -> Any:
        return await asyncio.to_thread(generated, model, way)

    return asyncio.run(awaited())


CALLS: Final[tuple[Habit, ...]] = (
    *(as_it_is, positionally, by_name, by_32_bits, with_a_configuration),
    *(with_the_models_configuration, without_a_cache, by_several_lengths, in_a_batch),
    *(in_a_batch_without_a_mask, in_a_batch_of_equal_lengths, in_a_batch_that_ends_early),
    *(several_samples, with_bias, in_inference_mode, with_gradients, in_a_thread, in_a_task),
)
CHANGES: Final[tuple[Habit, ...]] = (
    *(in_training_mode, on_eager_attention, compiled, of_a_compiled_layer),
    *(prepared_by_accelerate, dispatched, offloaded, in_parallel_data, inside_a_module),
)
"""Habits that do something to the model."""


def comparable(value: Any) -> Any:
    return (value.tolist(), value.dtype) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("habit", [*CALLS, *CHANGES], ids=lambda habit: habit.__name__)
def test_output_is_that_of_generate(habit: Habit) -> None:
    expected = habit(tiny(), {})
    model = tiny()
    drafting = foredraft(model, ScriptedDrafter(at_random()))
    assert comparable(habit(model, {"custom_generate": drafting})) == comparable(expected)


@pytest.mark.parametrize(
    "habit", [on_eager_attention, compiled, dispatched, offloaded, inside_a_module]
)
def test_drafts_are_for_the_model_as_it_was_made_before(habit: Habit) -> None:
    model = tiny()
    expected = habit(model, {})
    drafting = foredraft(model, ScriptedDrafter(at_random()))
    assert comparable(habit(model, {"custom_generate": drafting})) == comparable(expected)


WRAPPERS: Final[dict[str, Callable[[Any], Any]]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel data": nn.DataParallel,
    "a module": Wrapping,
    "modules": lambda model: Wrapping(Wrapping(model)),
    "accelerate": lambda model: Accelerator(cpu=True).prepare(model),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapper_and_the_model_inside_both_serve(wrap: Callable[[Any], Any]) -> None:
    model = tiny()
    expected = generated(model, {}).tolist()
    wrapper = wrap(model)
    for given in (wrapper, model):
        way = {"custom_generate": foredraft(given, ScriptedDrafter(at_random()))}
        assert generated(model, way).tolist() == expected
        if hasattr(wrapper, "generate"):
            assert generated(wrapper, way).tolist() == expected


def test_a_wrapper_of_no_model_or_of_two_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="LayerNorm holds no single model"):
        Foredraft(nn.LayerNorm(4), ScriptedDrafter(nothing))
    two = nn.ModuleList([tiny(), tiny()])
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM, LlamaForCausalLM"):
        Foredraft(two, ScriptedDrafter(nothing))


@pytest.fixture
def text_model(byte_tokenizer: PreTrainedTokenizerBase) -> tuple[Any, PreTrainedTokenizerBase]:
    """A tiny model, and a tokenizer of bytes."""
    return tiny(), byte_tokenizer


def test_a_pipeline_writes_the_same(text_model: Any) -> None:
    model, tokenizer = text_model
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    made: Any = TextGenerationPipeline
    pipeline = made(model=model, tokenizer=tokenizer)
    way = {"custom_generate": foredraft(model, ScriptedDrafter(at_random()))}
    for texts, more in (("one two", {}), (["one two", "three"], {"batch_size": 2})):
        options: Any = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **more}
        assert pipeline(texts, **options, **way) == pipeline(texts, **options)


def test_a_trainer_generates_the_same_in_its_evaluation(tmp_path: Any, text_model: Any) -> None:
    model, tokenizer = text_model
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        predict_with_generate=True,
        per_device_eval_batch_size=2,
        report_to=[],
        use_cpu=True,
    )
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    rows = [{"input_ids": row, "labels": row} for row in PROMPT.reshape(4, 6).tolist()]
    trainer: Any = Seq2SeqTrainer(model=model, args=arguments, processing_class=tokenizer)
    way = {"custom_generate": foredraft(model, ScriptedDrafter(at_random()))}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain, drafted = (
        trainer.predict(rows, **options, **each).predictions.tolist() for each in ({}, way)
    )
    assert drafted == plain


class Failing(TextStreamer):
    """Raises at its third token."""

    def put(self, _value: torch.Tensor) -> None:
        self.num = getattr(self, "num", 0) + 1
        if self.num == 3:
            raise ValueError("the reader left")

    def end(self) -> None:
        raise KeyError("nor does it end")


def test_a_streamer_that_raises_is_heard(text_model: Any) -> None:
    model, tokenizer = text_model
    for way in ({}, {"custom_generate": foredraft(model, ScriptedDrafter(at_random()))}):
        with pytest.raises(ValueError, match="the reader left"):
            generated(model, way, streamer=Failing(tokenizer))
        assert generated(model, way).shape == (1, 24 + NEW_TOKENS)


REFUSED: Final[dict[str, dict[str, Any]]] = {
    "attentions": {"return_dict_in_generate": True, "output_attentions": True},
    "positions": {"position_ids": torch.ones_like(PROMPT)},
    "a budget": {"budget": -1},
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_a_refusal_ends_what_reads_a_stream(text_model: Any, options: dict[str, Any]) -> None:
    model, tokenizer = text_model
    drafting = foredraft(model, ScriptedDrafter(at_random()))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    raised: list[Exception] = []

    def call() -> None:
        try:
            generated(model, {"custom_generate": drafting}, streamer=streamer, **options)
        except Exception as error:  # noqa: BLE001  whichever it is
            raised.append(error)

    thread = Thread(target=call)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert not text.strip()
    assert len(raised) == 1


def test_scores_and_a_stream_are_served_together(text_model: Any) -> None:
    model, tokenizer = text_model
    expected = generated(model, {})[0, 24:].tolist()
    drafting = foredraft(model, ScriptedDrafter(at_random()))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    options = {"return_dict_in_generate": True, "output_scores": True, "streamer": streamer}
    thread = Thread(target=generated, args=(model, {"custom_generate": drafting}), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(expected)


def test_an_asynchronous_stream_is_read_to_its_end(text_model: Any) -> None:
    model, tokenizer = text_model
    expected = generated(model, {})[0, 24:].tolist()
    way = {"custom_generate": foredraft(model, ScriptedDrafter(at_random()))}

    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
        thread = Thread(target=generated, args=(model, way), kwargs={"streamer": streamer})
        thread.start()
        text = "".join([piece async for piece in streamer])
        thread.join()
        return text

    assert asyncio.run(read()) == tokenizer.decode(expected)


@pytest.mark.parametrize("strings", ["a", ["zz", "b"]])
def test_stop_strings_are_found_with_the_tokenizer_that_was_given(
    text_model: Any, strings: Any
) -> None:
    model, tokenizer = text_model
    options = {"stop_strings": strings, "max_new_tokens": 60, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(PROMPT, tokenizer=tokenizer, **options)
    drafting = foredraft(model, ScriptedDrafter(at_random()), tokenizer=tokenizer)
    for more in ({}, {"tokenizer": tokenizer}):
        found = model.generate(PROMPT, custom_generate=drafting, **options, **more)
        assert found.tolist() == expected.tolist()
    without = foredraft(model, ScriptedDrafter(at_random()))
    with pytest.raises(UnsupportedGenerationError, match="tokenizer=tokenizer"):
        model.generate(PROMPT, custom_generate=without, **options)


def test_threads_that_share_one_wait_for_their_turn() -> None:
    model = tiny()
    lengths = [1 + at % 20 for at in range(100)]
    few = {"max_new_tokens": 3}
    outputs = [generated(model, few, PROMPT[:, : 1 + at]).tolist() for at in range(20)]
    expected = [outputs[length - 1] for length in lengths]
    way = {"custom_generate": foredraft(model, ScriptedDrafter(at_random()), queues=True), **few}
    with ThreadPoolExecutor(100) as pool:
        found = pool.map(lambda length: generated(model, way, PROMPT[:, :length]).tolist(), lengths)
        assert list(found) == expected


class Pausing(BaseStreamer):
    """Waits, at the first token of a call, until another thread has tried to call, too."""

    def __init__(self) -> None:
        self.is_in_call, self.has_tried = Event(), Event()
        self._num_told = 0

    def put(self, _value: torch.Tensor) -> None:
        self._num_told += 1
        if self._num_told == 2:  # the prompt comes before the call
            self.is_in_call.set()
            assert self.has_tried.wait(20)

    def end(self) -> None:
        """Nothing is left to do."""


def test_a_call_beside_another_is_refused_unless_calls_wait() -> None:
    model, streamer = tiny(), Pausing()
    way = {"custom_generate": foredraft(model, ScriptedDrafter(at_random()))}
    thread = Thread(target=generated, args=(model, way), kwargs={"streamer": streamer})
    thread.start()
    assert streamer.is_in_call.wait(20)
    with pytest.raises(DecoderBusyError, match="queues=True"):
        generated(model, way)
    streamer.has_tried.set()
    thread.join()
    assert generated(model, way).shape == (1, 24 + NEW_TOKENS)


def test_a_call_within_a_call_is_refused_where_calls_wait() -> None:
    model = tiny()
    way = {"custom_generate": foredraft(model, ScriptedDrafter(at_random()), queues=True)}
    with pytest.raises(DecoderBusyError, match="create another one"):
        generated(model, way, on_tokens=lambda _: generated(model, way))
    assert generated(model, way).shape == (1, 24 + NEW_TOKENS)


def test_two_decode_in_two_threads() -> None:
    models = [tiny(seed) for seed in (3, 4)]
    expected = [generated(model, {}, max_new_tokens=30).tolist() for model in models]
    ways = [{"custom_generate": foredraft(each, ScriptedDrafter(at_random()))} for each in models]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            found = pool.map(
                lambda model, way: generated(model, way, max_new_tokens=30).tolist(), models, ways
            )
            assert list(found) == expected


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_say_what_to_do_instead(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="Foredraft belongs to the process"):
        copied(foredraft(tiny(), ScriptedDrafter(nothing)))


def test_a_prompt_elsewhere_fails_as_it_does_without_drafts() -> None:
    model = tiny()
    way = {"custom_generate": foredraft(model, ScriptedDrafter(nothing))}
    for each in ({}, way):
        with pytest.raises((NotImplementedError, RuntimeError, UnsupportedGenerationError)):
            generated(model, each, PROMPT.to("meta"))
    assert generated(model, way).tolist() == generated(model, {}).tolist()
