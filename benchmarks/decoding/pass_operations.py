"""What a step asks a device for outside of captured graphs: counted, without a device.

A small model lies on a stand-in for a device, which counts launches, copies and waits. A captured
function is one launch, whatever it computes. Sequences are decoded greedily with drafts of bushy
trees, whose accepted paths move in the cache, and with recycled logits: one alone, and several that
share passes. A step is all from one pass to the next.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.comparison import circumstances
from benchmarks.decoding.elsewhere import Device, elsewhere, sent
from decoder.budget.budget import FixedBudget
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.recycling import RecycledLogits
from decoder.loop import Decoder, Request
from decoder.model import target as target_module
from decoder.model.graphs import CaptureMaker, Output
from decoder.model.passes import Reading
from decoder.model.target import Target
from retriever.drafter import DraftRequest, TokenIds
from retriever.follower import DraftLimits
from retriever.tree import ROOT, DraftTree

VOCABULARY: Final = 96
NUM_NODES: Final = 12


@dataclass(frozen=True, slots=True)
class Step:
    """What one step asked the device for.

    Attributes:
        launches: operations outside of graphs, copies on the device among them.
        replays: captured functions.
        uploads: copies to the device.
        downloads: copies from the device, each of which the host waits for.
        waits: of all copies, those for which the host waits.
    """

    launches: int
    replays: int
    uploads: int
    downloads: int
    waits: int

    @property
    def outside(self) -> int:
        """Return all that is asked for outside of graphs, copies included."""
        return self.launches + self.uploads + self.downloads


class Replays:
    """Captures functions; each call of one counts as a replay, and nothing that it does counts."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.count = 0

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        """See `decoder.model.graphs.Capture`."""

        def replay() -> Output:
            self.count += 1
            with self._device.uncounted():
                return function()

        return replay


class CountedTarget(Target):
    """A target that notes the counts at the beginning of each pass."""

    def begin(self, device: Device, replays: Replays) -> None:
        """Count from now on."""
        self._counters = device, replays
        self._is_counted = True
        self.marks: list[tuple[bool, Step]] = []

    def read(self, readings: Sequence[Reading]) -> list[Any]:
        """See `Target.read`."""
        device, replays = self._counters
        now = Step(
            device.launches.total(),
            replays.count,
            device.uploads,
            device.waits,
            device.waits + device.blocking,
        )
        is_whole = all(reading.tree is not None and len(reading.tree) for reading in readings)
        self.marks.append((is_whole, now))
        return super().read(readings)

    def steps(self) -> list[Step]:
        """Return what each step asked for whose sequences all verified trees."""
        counted = []
        for (is_whole, began), (_, ended) in zip(self.marks, self.marks[1:], strict=False):
            if is_whole:
                before, after = asdict(began), asdict(ended)
                counted.append(Step(**{name: after[name] - before[name] for name in after}))
        return counted


class Foreknowing:
    """Drafts what comes behind a wrong branch at every depth, so that accepted paths move."""

    def __init__(self, texts: Sequence[TokenIds]) -> None:
        self._texts = texts
        self._lengths: dict[str, tuple[TokenIds, int]] = {}

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:  # noqa: ARG002
        """Find the text that a prompt begins."""
        text = next(each for each in self._texts if np.array_equal(each[: len(prompt)], prompt))
        self._lengths[session] = text, len(prompt)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return a tree for each request."""
        return [self._tree(*self._lengths[each.session], each.length) for each in requests]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:  # noqa: ARG002
        """Forget a sequence."""
        del self._lengths[session]

    @staticmethod
    def _tree(text: TokenIds, _num_prompt: int, length: int) -> DraftTree:
        coming = text[length : length + 4]
        tokens, parents, above = [], [], ROOT
        for token in coming.tolist():
            parents += [above, above]
            tokens += [(token + 1) % VOCABULARY, token]
            above = len(tokens) - 1
        count = len(tokens)
        return DraftTree.checked(tokens, parents, np.linspace(0.9, 0.1, count), np.zeros(count))


def tiny_model() -> PreTrainedModel:
    """Return a model of two layers, on the CPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    made: Any = LlamaForCausalLM(config)
    evaluated: PreTrainedModel = made.eval()
    return evaluated


def send(model: nn.Module) -> None:
    """Have all weights and buffers of a model on the stand-in."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(sent(weight.data), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, sent(buffer))


def texts_of(model: PreTrainedModel, count: int, num_tokens: int) -> list[TokenIds]:
    """Return prompts with what the model goes on with, int32[n] each."""
    rng, texts = np.random.default_rng(0), []
    for _ in range(count):
        prompt = torch.from_numpy(rng.integers(4, VOCABULARY, (1, 12)))
        with torch.no_grad():
            for _ in range(num_tokens):
                logits = model(input_ids=prompt, use_cache=False).logits[:, -1:]
                prompt = torch.cat([prompt, logits.argmax(-1)], dim=1)
        texts.append(prompt[0].numpy().astype(np.int32))
    return texts


def counted_steps(num_sequences: int, num_tokens: int = 24) -> list[Step]:
    """Decode some sequences in shared passes; return what each whole step asked for.

    Raises:
        RuntimeError: an output is not the model's.
    """
    model = tiny_model()
    texts = texts_of(model, num_sequences, num_tokens)
    with elsewhere() as device:
        send(model)
        replays = Replays(device)
        target = _on_the_stand_in(model, lambda: replays)
        target.prepare(64, num_sequences, 64)
        target.begin(device, replays)
        drafter = FusedDrafter(
            [Foreknowing(texts)], DraftLimits(VOCABULARY, None), recycled=RecycledLogits(1 << 10)
        )
        decoder = Decoder(target, drafter, FixedBudget(NUM_NODES))
        requests = [Request(text[:12], num_tokens) for text in texts]
        found: dict[int, list[int]] = {}
        for generation, tokens in decoder.generate_many(requests, num_sequences):
            if generation.error is not None:
                raise generation.error
            found.setdefault(generation.number, []).extend(tokens)
    for number, text in enumerate(texts):
        if found[number] != text[12:].tolist():
            raise RuntimeError(f"output {number} is not the model's")
    return target.steps()


def _on_the_stand_in(model: PreTrainedModel, capture: CaptureMaker) -> CountedTarget:
    """Return a target, though the stand-in's tensors look as if they were on no device."""
    check = target_module._check_placing  # noqa: SLF001
    setattr(target_module, "_check_placing", lambda _: None)  # noqa: B010
    try:
        return CountedTarget(model, capture=capture, verdicts=None)
    finally:
        setattr(target_module, "_check_placing", check)  # noqa: B010


def main(
    *,
    sequences: Annotated[list[int], typer.Option(help="In a pass; repeatable.")] = [1, 4],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the greatest of each over all steps."""
    rows = []
    for count in sequences:
        steps = counted_steps(count)
        most = {name: max(asdict(step)[name] for step in steps) for name in asdict(steps[0])}
        most["outside"] = max(step.outside for step in steps)
        rows.append({"sequences": count, "steps": len(steps), "most": most})
    if as_json:
        print(json.dumps({**circumstances(), "rows": rows}, indent=1))
    else:
        for row in rows:
            print(row)


if __name__ == "__main__":
    typer.run(main)
