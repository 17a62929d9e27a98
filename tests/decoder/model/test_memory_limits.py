"""What becomes of a sequence when memory runs out."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicLayer

from decoder.errors import OutOfMemoryError
from decoder.model.cache import GrowingLayer
from decoder.model.target import Target
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    ScriptedDrafter,
    decoder_with,
    oracle,
    plainly,
    prompt_of,
    tiny_convolution,
    tiny_llama,
    tiny_mamba,
)
from tests.decoder.model.test_target import FORKED
from tests.decoder.rounding import Rounding

LACK = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"


def without_memory_for(monkeypatch: pytest.MonkeyPatch, num_tokens: int, layer: int = 0) -> None:
    """Let buffers grow to fewer than `num_tokens`, and exactly; the layers before `layer` may."""
    grow = GrowingLayer.grow
    order: list[GrowingLayer] = []

    def limited(self: GrowingLayer, capacity: int) -> None:
        if self not in order:
            order.append(self)
        if capacity >= num_tokens and order.index(self) >= layer:
            raise RuntimeError(LACK)
        grow(self, capacity)

    monkeypatch.setattr(GrowingLayer, "grow", limited)


def test_a_pass_without_memory_is_tried_with_fewer_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    prompt = prompt_of(10)
    expected = plainly(model, prompt, 40)
    decoder = decoder_with(model, ScriptedDrafter(oracle(prompt + expected)))
    without_memory_for(monkeypatch, 60, layer=1)
    generation = decoder.generate(prompt, 40)
    assert [token for step in generation for token in step] == expected
    assert 0 < decoder.target.max_nodes < 24


@pytest.mark.parametrize("layer", [0, 1])
def test_without_memory_for_one_token_the_text_so_far_is_kept(
    monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    model = tiny_llama()
    prompt = prompt_of(10)
    expected = plainly(model, prompt, 60)
    drafter = ScriptedDrafter(oracle(prompt + expected))
    decoder = decoder_with(model, drafter)
    without_memory_for(monkeypatch, 41, layer)
    text: list[int] = []
    message = r"out of memory at 41 tokens of context: Default"
    with pytest.raises(OutOfMemoryError, match=message):
        text.extend(token for step in decoder.generate(prompt, 60) for token in step)
    assert text == expected[: 41 - len(prompt)]
    assert drafter.open_sessions == {}
    monkeypatch.undo()
    decoder.target.max_nodes = 64
    assert [token for step in decoder.generate(prompt, 60) for token in step] == expected


def test_a_failed_pass_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(dtype=torch.float64)
    target = Target(model)
    target.prefill(np.array(prompt_of(20), np.int32))
    expected = target.verify(5, FORKED)
    target.rewind()
    with monkeypatch.context() as patched:
        without_memory_for(patched, 0, layer=1)
        for layer in target._places.at(0).cache.growing_layers:  # type: ignore[attr-defined]
            layer._key_buffer = layer._key_buffer[..., :20, :].clone()
            layer._value_buffer = layer._value_buffer[..., :20, :].clone()
        with pytest.raises(OutOfMemoryError):
            target.verify(5, FORKED)
    Rounding.of(model).check(target.verify(5, FORKED), expected)


def test_state_that_a_failed_pass_left_halfway_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_mamba()
    target = Target(model)
    target.prefill(np.array(prompt_of(9), np.int32))
    nothing = DraftTree.empty()
    expected = target.verify(5, nothing)
    target.rewind()
    forward = type(model).forward

    def failing(*arguments: object, **options: object) -> None:
        forward(*arguments, **options)
        raise RuntimeError(LACK)

    with monkeypatch.context() as patched:
        patched.setattr(type(model), "forward", failing)
        with pytest.raises(OutOfMemoryError):
            target.verify(5, nothing)
    Rounding.of(model).check(target.verify(5, nothing), expected)


def test_a_cache_that_cannot_undo_half_a_pass_ends_the_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_convolution()
    prompt = prompt_of(10)
    expected = plainly(model, prompt, 30)
    decoder = decoder_with(model, ScriptedDrafter(oracle(prompt + expected)))
    update = DynamicLayer.update

    def limited(self: DynamicLayer, keys: torch.Tensor, *others: Any, **more: Any) -> Any:
        if self.get_seq_length() + keys.shape[-2] > 25:
            raise RuntimeError(LACK)
        return update(self, keys, *others, **more)

    text: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(DynamicLayer, "update", limited)
        with pytest.raises(OutOfMemoryError, match="cannot undo"):
            text.extend(token for step in decoder.generate(prompt, 30) for token in step)
    assert text
    assert text == expected[: len(text)]


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(GrowingLayer, "update", broken)
    with pytest.raises(RuntimeError, match="size mismatch"):
        Target(tiny_llama(), verdicts=None).prefill(np.array(prompt_of(9), np.int32))


UNDER_A_LIMIT = """
import resource
import numpy as np
import torch
from transformers.cache_utils import DynamicLayer

from decoder.errors import OutOfMemoryError
from decoder.model.target import Target
from retriever.tree import DraftTree
from tests.decoder.decoding import tiny_llama

model = tiny_llama()
target = Target(model)
target.max_length = None
target.prefill(np.zeros(9, np.int32))
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
limit = used + (8 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    target.prefill(np.zeros(30_000, np.int32))
except OutOfMemoryError as error:
    print(error)
target.prefill(np.zeros(9, np.int32))
target.verify(1, DraftTree.empty())
print("goes on")
"""


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the address space")
def test_a_real_lack_of_memory_is_named_and_survived() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("out of memory at 30000 tokens of context: ")
    assert done.stdout.endswith("goes on\n")
