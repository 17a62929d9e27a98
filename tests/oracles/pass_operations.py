"""What a step asks a device for outside of captured graphs: counted, without a device.

A small model lies on a stand-in for a device, which counts launches, copies and waits. A captured
function is one launch, whatever it computes. Sequences are decoded greedily or sampled: one alone,
and several that share passes. Drafts are bushy trees with recycled logits, whose accepted paths
move in the cache, or chains. A step is all from one pass to the next.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.comparison import circumstances
from decoder.budget.budget import FixedBudget
from decoder.drafters.following import NoDrafter
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.recycling import RecycledLogits
from decoder.loop import Decoder, Request
from decoder.model import target as target_module
from decoder.model.graphs import CaptureMaker, Output
from decoder.model.passes import Reading
from decoder.model.target import Target
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from retriever.drafter import DEFAULT, Drafter, DraftRequest, SequenceOptions, TokenIds
from retriever.follower import DraftLimits
from retriever.tree import ROOT, DraftTree
from tests.oracles.elsewhere import Device, elsewhere, sent

VOCABULARY: Final = 96
NUM_NODES: Final = 12
NUM_TOKENS: Final = 24


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
    """Drafts what comes, each token behind a wrong branch, so that accepted paths move.

    Args:
        texts: that are decoded.
        forks: whether there are wrong branches; otherwise drafts are chains.
    """

    def __init__(self, texts: Sequence[TokenIds], *, forks: bool) -> None:
        self._texts, self._forks = texts, forks
        self._lengths: dict[str, tuple[TokenIds, int]] = {}

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:  # noqa: ARG002
        """Find the text that a prompt begins."""
        text = next(each for each in self._texts if np.array_equal(each[: len(prompt)], prompt))
        self._lengths[session] = text, len(prompt)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return a tree for each request."""
        return [self._tree(*self._lengths[each.session], each.length) for each in requests]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:  # noqa: ARG002
        """Forget a sequence."""
        del self._lengths[session]

    def _tree(self, text: TokenIds, _num_prompt: int, length: int) -> DraftTree:
        coming = text[length : length + 4]
        tokens, parents, above = list[int](), list[int](), ROOT
        for token in coming.tolist():
            siblings = [(token + 1) % VOCABULARY, token] if self._forks else [token]
            parents += [above] * len(siblings)
            tokens += siblings
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


SETTINGS: Final = {
    "greedy": SamplingSettings(),
    "sampled": SamplingSettings(0.8, top_k=40, top_p=0.95, min_p=0.01, seed=3),
}
"""What is counted by each name."""


def decoded(
    target: Target,
    drafter: Drafter,
    settings: SamplingSettings,
    prompts: Sequence[TokenIds],
    num_tokens: int = NUM_TOKENS,
) -> list[TokenIds]:
    """Decode prompts in shared passes; return them with their outputs, int32[n] each.

    Raises:
        Exception: what ended one of them too early.
    """
    decoder = Decoder(target, drafter, FixedBudget(NUM_NODES), accept_rule(settings))
    texts = [prompt.tolist() for prompt in prompts]
    requests = [Request(prompt, num_tokens) for prompt in prompts]
    for generation, tokens in decoder.generate_many(requests, len(prompts)):
        if generation.error is not None:
            raise generation.error
        texts[generation.number].extend(tokens)
    return [np.array(text, np.int32) for text in texts]


def counted_steps(
    num_sequences: int,
    settings: SamplingSettings | None = None,
    *,
    forks: bool = True,
    num_tokens: int = NUM_TOKENS,
) -> list[Step]:
    """Decode some sequences in shared passes; return what each whole step asked for.

    Args:
        num_sequences: that share passes.
        settings: how tokens are chosen; greedily by default.
        forks: whether trees are drafted, with recycled logits, and not chains.
        num_tokens: of each output.

    Raises:
        RuntimeError: an output is not that of plain decoding on the CPU.
    """
    model, rng = tiny_model(), np.random.default_rng(0)
    settings = settings or SETTINGS["greedy"]
    prompts = [rng.integers(4, VOCABULARY, 12, np.int32) for _ in range(num_sequences)]
    texts = decoded(Target(model, verdicts=None), NoDrafter(), settings, prompts, num_tokens)
    with elsewhere() as device:
        send(model)
        replays = Replays(device)
        target = _on_the_stand_in(model, lambda: replays)
        target._is_packing_checked = True  # outputs are compared below
        target.prepare(64, num_sequences, 64)
        target.begin(device, replays)
        drafter: Drafter = Foreknowing(texts, forks=forks)
        if forks:
            limits = DraftLimits(VOCABULARY, None)
            drafter = FusedDrafter([drafter], limits, recycled=RecycledLogits(1 << 10))
        found = decoded(target, drafter, settings, prompts, num_tokens)
    for number, (own, expected) in enumerate(zip(found, texts, strict=True)):
        if not np.array_equal(own, expected):
            raise RuntimeError(f"output {number} is not that of plain decoding")
    return target.steps()


def _on_the_stand_in(model: PreTrainedModel, capture: CaptureMaker) -> CountedTarget:
    """Return a target, though the stand-in's tensors look as if they were on no device."""
    check = target_module._check_placing
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
    for count, (choosing, settings), forks in product(sequences, SETTINGS.items(), (True, False)):
        steps = counted_steps(count, settings, forks=forks)
        most = {name: max(asdict(step)[name] for step in steps) for name in asdict(steps[0])}
        most["outside"] = max(step.outside for step in steps)
        drafts = "trees" if forks else "chains"
        rows.append(
            {
                "sequences": count,
                "choosing": choosing,
                "drafts": drafts,
                "steps": len(steps),
                "most": most,
            }
        )
    if as_json:
        print(json.dumps({**circumstances(), "rows": rows}, indent=1))
    else:
        for row in rows:
            print(row)


if __name__ == "__main__":
    typer.run(main)
