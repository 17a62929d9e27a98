"""Outputs of tiny models in every mode of decoding.

A greedy output in float32 must be the one of plain `generate`, and a coupled drawn one that without
drafts; else recording fails. Budgets are fixed: no time decides what is verified.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)

from decoder.budget.budget import FixedBudget
from decoder.budget.cost_store import key_of
from decoder.budget.costs import CostSurface
from decoder.drafters.asking import StepCosts
from decoder.drafters.draft_model import DraftModel, ModelReader
from decoder.drafters.drawing import DrawnFusion, Draws
from decoder.drafters.following import NoDrafter, states_of
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.readers import TreeReader
from decoder.drafters.recycling import RecycledLogits
from decoder.engines.transformers import custom_generate
from decoder.engines.transformers.custom_generate import Foredraft, foredraft_generate
from decoder.loop import Decoder, Request
from decoder.model.target import Target
from decoder.observation import ObservedPass, Statistics
from decoder.plugins.speculators.speculator import load_speculator
from decoder.sampling.constraint import Grammar
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.stopping import StoppableText, StopStrings, plain_text
from indexer.tokenizer import CACHE_VARIABLE
from retriever.drafter import Drafter, Prediction, SequenceOptions
from retriever.follower import DraftLimits
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    SIZES,
    VOCABULARY,
    AheadDrafter,
    Guess,
    ScriptedDrafter,
    at_random,
    by_tokens,
    decoder_ahead,
    evaluated,
    every_token,
    nothing,
    oracle,
    plainly,
    prompt_of,
    tiny_convolution,
    tiny_gemma,
    tiny_llama,
    tiny_mamba,
)
from tests.decoder.engines.transformers.generating import EndsAfter, perfect
from tests.decoder.engines.transformers.test_streaming import Listener
from tests.decoder.plugins.speculators.published_heads import official_eagle3
from tests.golden.byte_tokenizer import STOP, byte_tokenizer
from tests.golden.record import MARGIN_TOLERANCE, Step, exact, output_step, rate_step
from tests.golden.sections import Scope
from tests.oracles.exactness.tiny_models import tiny_model

NEW_TOKENS: Final = 32
PROMPTS: Final = [
    prompt_of(length, seed) for length, seed in ((12, 16), (3, 6), (40, 43), (1, 5), (19, 22))
]
"""Of which no model's output turns on rounding."""

PAD: Final = 0
NODES: Final = 16
"""Of each budget but those of scripted drafters, so that the order of nodes decides what is cut."""

STOPS: Final = [5, 11, 17, 23]
_BFLOAT16_SLACK: Final = 0.5
"""Between the logits of what is most probable in passes of one width and of another."""

_FREE: Final = StepCosts(target_s=1.0, pass_s=0.0)
"""Passes of draft models that always pay."""

_COUNTS: Final = (
    "num_tokens",
    "num_passes",
    "num_drafts",
    "num_drafted",
    "num_accepted",
    "accepted_per_position",
    "drafted",
    "widths",
    "accepted",
    "num_failures",
)
"""Statistics that no time decides."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a sequence: its tokens, its figures, and the nodes that passes verified."""

    tokens: list[int] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    verified: list[int] = field(default_factory=list)

    def see(self, seen: ObservedPass) -> None:
        """Note what a pass verified."""
        self.verified.extend(seen.tree.token_ids.tolist())


@dataclass(frozen=True, slots=True)
class Subject:
    """A model whose outputs are recorded, as steps under a name.

    Attributes:
        path: with which the names of its steps begin.
        model: of the outputs.
        scratch: a folder.
        truths: what plain `generate` gave so far, by prompt and stop token.
    """

    path: str
    model: PreTrainedModel
    scratch: Path
    truths: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether passes of any width choose the same tokens."""
        return self.model.dtype == torch.float32

    def truth(self, prompt: list[int], stop: int | None = None) -> list[int]:
        """Return what transformers itself generates greedily."""
        key = (*prompt, stop)
        if key not in self.truths:
            self.truths[key] = plainly(self.model, prompt, NEW_TOKENS, stop)
        return self.truths[key]

    @torch.inference_mode()
    def margins(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Return by how much each token is more probable than the next best, by one plain pass."""
        model: Any = self.model
        rows = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0].float()
        rows, chosen = rows[len(prompt) - 1 : -1], torch.tensor(tokens)[:, None]
        others = rows.scatter(1, chosen, -torch.inf).amax(1, keepdim=True)
        margins = (rows.gather(1, chosen) - others)[:, 0].tolist()
        return [round(margin, 4) for margin in margins]

    def greedy(
        self, name: str, prompt: list[int], tokens: list[int], expected: list[int] | None = None
    ) -> Step:
        """Return the step of a greedy output, which is the expected one, that of `generate`."""
        name = f"{self.path}/{name}"
        if not self.is_exact:
            assert min(self.margins(prompt, tokens)) > -_BFLOAT16_SLACK, f"{name} is improbable"
            return output_step(name, tokens)
        truth = self.truth(prompt)
        expected = truth if expected is None else expected
        assert tokens == expected, f"{name}: {tokens}, and plain generate gives {expected}"
        is_same = [one == other for one, other in zip(tokens, truth, strict=False)]
        kept = (*is_same, False).index(False)  # padding may follow
        margins = self.margins(prompt, truth[:kept])
        assert min(margins) > MARGIN_TOLERANCE, f"{name} turns on rounding: choose another prompt"
        return output_step(name, tokens, margins)

    def here(self, name: str, numbers: Sequence[int]) -> Step:
        """Return a step of numbers that hold on one machine alone, as drawn tokens do."""
        return output_step(f"{self.path}/{name}", numbers)

    def scripted(
        self, name: str, prompt: list[int], ran: Ran, expected: list[int] | None = None
    ) -> Iterator[Step]:
        """Yield a greedy output and its figures, which follow from the output alone."""
        yield self.greedy(name, prompt, ran.tokens, expected)
        if self.is_exact:
            yield exact(f"{self.path}/{name}/counts", counts(ran.statistics))
        else:
            yield self.here(f"{name}/counts", figures(ran.statistics))

    def learned(self, name: str, prompt: list[int], ran: Ran) -> Iterator[Step]:
        """Yield a greedy output that was drafted for by probabilities, and what was verified."""
        yield self.greedy(name, prompt, ran.tokens)
        rate = len(ran.tokens), ran.statistics.num_passes
        yield rate_step(f"{self.path}/{name}/tokens per pass", *rate)
        yield self.here(f"{name}/verified", ran.verified)

    def decoder(self, drafter: Drafter, nodes: int = NODES, **options: Any) -> Decoder:
        """Return a decoder of the model with a fixed budget."""
        target = Target(self.model, states=states_of(drafter))
        return Decoder(target, drafter, FixedBudget(nodes), **options)


def counts(statistics: Statistics) -> dict[str, Any]:
    """Return all figures but times."""
    report = statistics.report()
    return {name: report[name] for name in _COUNTS}


def figures(statistics: Statistics) -> list[int]:
    """Return passes, verified nodes and accepted ones."""
    return [statistics.num_passes, statistics.num_drafted, statistics.num_accepted]


def together(decoder: Decoder, requests: Sequence[Request], parallel: int = 3) -> list[Ran]:
    """Decode several sequences at once."""
    ran = [Ran() for _ in requests]
    watched = [replace(each, observer=one.see) for each, one in zip(requests, ran, strict=True)]
    for generation, tokens in decoder.generate_many(watched, parallel):
        assert generation.error is None, generation.error
        ran[generation.number].tokens.extend(tokens)
        if generation.is_over:
            ran[generation.number].statistics.add(generation.statistics)
    return ran


def alone(decoder: Decoder, prompt: list[int], **options: Any) -> Ran:
    """Decode one sequence."""
    ran = Ran()
    generation = decoder.generate(prompt, NEW_TOKENS, observer=ran.see, **options)
    ran.tokens.extend(token for step in generation for token in step)
    ran.statistics.add(generation.statistics)
    return ran


def any_of(sequences: Sequence[list[int]]) -> Guess:
    """Draft what comes, of several sequences, among wrong branches, and anything elsewhere."""
    guesses = [(tokens, oracle(tokens, 12)) for tokens in sequences]
    otherwise = at_random(12)

    def guess(tokens: list[int], budget: int) -> DraftTree:
        known = (drafts for whole, drafts in guesses if whole[: len(tokens)] == tokens)
        return next(known, otherwise)(tokens, budget)

    return guess


def embedded() -> Drafter:
    """Return a retrieving drafter that has seen some text."""
    drafter = EmbeddedDrafter()
    text = np.array(prompt_of(600, seed=3) * 2, np.int32)
    drafter.open("seen", text[:700])
    drafter.close("seen", text[700:])
    return drafter


def fused(*drafters: Drafter, readers: Sequence[TreeReader] = ()) -> FusedDrafter:
    """Return drafters with recycled logits and readers that are always asked."""
    limits, recycled = DraftLimits(VOCABULARY, VOCABULARY), RecycledLogits(1 << 12)
    return FusedDrafter(drafters, limits, readers=readers, recycled=recycled, costs=_FREE)


def of_model(draws: Draws | None = None) -> FusedDrafter:
    """Return a draft model, another one than the target, that drafts alone."""
    limits, readers = DraftLimits(VOCABULARY, VOCABULARY), [ModelReader(DraftModel(draft_model()))]
    if draws is None:
        return FusedDrafter([], limits, readers=readers, costs=_FREE)
    return DrawnFusion([], limits, readers=readers, draws=draws, costs=_FREE)


def draft_model() -> PreTrainedModel:
    """Return the target `llama` with some noise: often right, and not always."""
    model = tiny_llama(layers=3)
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.03 * torch.randn(weights.shape, generator=noise))
    return model


def fast_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of `byte_llama`, as transformers has it."""
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=byte_tokenizer(), eos_token=STOP)  # type: ignore[no-any-return]


def byte_llama() -> PreTrainedModel:
    """Return a model of the byte tokenizer."""
    torch.manual_seed(3)
    options: dict[str, Any] = {**SIZES, "vocab_size": 257, "num_hidden_layers": 2}
    config = LlamaConfig(**options, max_position_embeddings=256, eos_token_id=None)
    return evaluated(LlamaForCausalLM(config))


# Modes: each yields the steps of a subject.


def trees(subject: Subject) -> Iterator[Step]:
    """Decode one sequence with drafts that are right in part, wrong, or none."""
    for number, prompt in enumerate(PROMPTS[:2]):
        whole = [*prompt, *subject.truth(prompt)]
        guesses = {
            "oracle": oracle(whole),
            "chain": perfect(whole),
            "at random": at_random(),
            "every token": every_token,
            "nothing": nothing,
        }
        for name, guess in guesses.items():
            ran = alone(subject.decoder(ScriptedDrafter(guess), 64), prompt)
            yield from subject.scripted(f"{name}/{number}", prompt, ran)


def packed(subject: Subject) -> Iterator[Step]:
    """Decode several sequences at once; some wait for a place."""
    requests = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS]
    wholes = [[*prompt, *subject.truth(prompt)] for prompt in PROMPTS]
    for name, drafter in (("any", ScriptedDrafter(any_of(wholes))), ("none", NoDrafter())):
        for number, ran in enumerate(together(subject.decoder(drafter), requests)):
            yield from subject.scripted(f"{name}/{number}", PROMPTS[number], ran)


def stops(subject: Subject) -> Iterator[Step]:
    """End a sequence by a token, late and early, within an accepted path."""
    prompt = PROMPTS[0]
    truth = subject.truth(prompt)
    for at in (4, 19):
        decoder = subject.decoder(ScriptedDrafter(perfect(prompt + truth)), stop_ids=[truth[at]])
        ran = alone(decoder, prompt)
        yield from subject.scripted(f"{at}", prompt, ran, subject.truth(prompt, truth[at]))


def stop_strings(subject: Subject) -> Iterator[Step]:
    """End a sequence by a text."""
    tokenizer, prompt = fast_tokenizer(), PROMPTS[0]
    truth = subject.truth(prompt)
    for number, string in enumerate(sorted({*plain_text(tokenizer, truth)} - {"\ufffd"})[:3]):
        text = StoppableText(tokenizer, StopStrings([string]))
        drafter = ScriptedDrafter(perfect(prompt + truth))
        ran = alone(subject.decoder(drafter), prompt, stop_rule=text)
        output = called(subject, [prompt], stop_strings=[string], tokenizer=tokenizer)
        yield from subject.scripted(f"{number}", prompt, ran, new_rows(output, [prompt])[0])
        yield exact(f"{subject.path}/{number}/text", text.take() + text.finish())


def chat(subject: Subject) -> Iterator[Step]:
    """Go on from what is kept of earlier turns, of other chats, and of none."""
    drafter, rows = ScriptedDrafter(at_random()), list[int]()
    decoder = subject.decoder(drafter)
    watching = subject.model.register_forward_pre_hook(
        lambda _, __, given: rows.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    conversation = prompt_of(40)
    for turn in range(3):
        rows.clear()
        ran = alone(decoder, conversation)
        read = sum(rows)
        yield from subject.scripted(f"turn {turn}", conversation, ran)
        yield exact(f"{subject.path}/turn {turn}/rows", read)
        conversation = [*conversation, *ran.tokens, *prompt_of(5, seed=turn)]
    other = [*conversation[:50], *prompt_of(4, seed=8)]
    yield from subject.scripted("other", other, alone(decoder, other))
    watching.remove()


def ahead(subject: Subject) -> Iterator[Step]:
    """Draft while passes run."""
    truths = [(prompt, subject.truth(prompt)) for prompt in PROMPTS]
    decoder = decoder_ahead(subject.model, AheadDrafter(by_tokens(truths, 0.6)))
    requests = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS]
    for number, ran in enumerate(together(decoder, requests)):
        yield from subject.scripted(f"{number}", PROMPTS[number], ran)


def retrieval(subject: Subject) -> Iterator[Step]:
    """Draft from what was decoded: one after another, together, and the same again."""
    decoder = subject.decoder(embedded())
    for turn in range(2):
        for number, prompt in enumerate(PROMPTS[:3]):
            yield from subject.learned(f"{number}/turn {turn}", prompt, alone(decoder, prompt))
    requests = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS]
    for number, ran in enumerate(together(subject.decoder(embedded(), 4), requests)):
        yield from subject.learned(f"{number}/together", PROMPTS[number], ran)


def predictions(subject: Subject) -> Iterator[Step]:
    """Draft from what an output is expected to contain, right and edited."""
    for number, prompt in enumerate(PROMPTS[:2]):
        truth = subject.truth(prompt)
        for name, tokens in (("true", truth), ("edited", [*truth[:9], 3, *truth[12:]])):
            predicted = Prediction(np.array(tokens, np.int32), name)
            options = SequenceOptions(predictions=(predicted,))
            for kind, drafter in (("retrieval", EmbeddedDrafter()), ("fused", fused(embedded()))):
                ran = alone(subject.decoder(drafter), prompt, options=options)
                yield from subject.learned(f"{name}/{kind}/{number}", prompt, ran)


GROUPED: Final = SequenceOptions(remember=False, group="samples")


def groups(subject: Subject) -> Iterator[Step]:
    """Draft for samples of one prompt from one another."""
    prompt = PROMPTS[0]
    for name, options in (("group", GROUPED), ("policy", replace(GROUPED, policy_version=3))):
        requests = [Request(prompt, most, options) for most in (NEW_TOKENS, 9, 9)]
        requests += [requests[0]] * 2
        for kind, drafter in (("retrieval", EmbeddedDrafter()), ("fused", fused(embedded()))):
            for number, ran in enumerate(together(subject.decoder(drafter), requests)):
                if requests[number].max_new_tokens == NEW_TOKENS:
                    yield from subject.learned(f"{name}/{kind}/{number}", prompt, ran)


def fusion(subject: Subject) -> Iterator[Step]:
    """Draft from recycled logits, retrieval, a draft model and a head, in one tree."""
    folder = official_eagle3().write(subject.scratch)
    reader, head = ModelReader(DraftModel(draft_model())), load_speculator(folder, subject.model)
    drafters: dict[str, Drafter] = {
        "recycled": fused(),
        "retrieval": fused(embedded()),
        "model": fused(embedded(), readers=[reader]),
        "head": fused(NoDrafter(), readers=[head]),
        "all": fused(embedded(), readers=[reader, head]),
        "draft model": of_model(),
    }
    requests = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS[1:4]]
    for name, drafter in drafters.items():
        decoder = subject.decoder(drafter, 8)
        for turn in range(2):
            ran = alone(decoder, PROMPTS[0])
            yield from subject.learned(f"{name}/turn {turn}", PROMPTS[0], ran)
        for number, ran in enumerate(together(decoder, requests, 2), start=1):
            yield from subject.learned(f"{name}/{number}", PROMPTS[number], ran)


_SETTINGS: Final = {
    "temperature": SamplingSettings(0.8, seed=5),
    "top-k": SamplingSettings(1.0, top_k=7, seed=5),
    "top-p": SamplingSettings(1.0, top_p=0.8, seed=6),
    "min-p": SamplingSettings(1.2, min_p=0.05, seed=7),
    "penalties": SamplingSettings(0.9, 20, 0.95, 0.01, 1.2, 0.3, 0.2, seed=8),
    "penalised greedy": SamplingSettings(repetition_penalty=1.3, frequency_penalty=0.2, seed=1),
}


def drawn(subject: Subject) -> Iterator[Step]:
    """Draw outputs: coupled ones are the same with any drafts, others depend on them."""
    requests = [Request(prompt, 24) for prompt in PROMPTS[:2]]
    for name, settings in _SETTINGS.items():
        rule = accept_rule(settings)
        plain = together(subject.decoder(NoDrafter(), accept=rule), requests)
        for kind in ("every token", "retrieval"):
            drafter = embedded() if kind == "retrieval" else ScriptedDrafter(every_token)
            found = together(subject.decoder(drafter, 48, accept=rule), requests)
            for number, (ran, without) in enumerate(zip(found, plain, strict=True)):
                assert ran.tokens == without.tokens, f"{name}/{kind}/{number} depends on drafts"
                yield subject.here(f"{name}/{kind}/{number}", ran.tokens)
                yield subject.here(f"{name}/{kind}/{number}/counts", figures(ran.statistics))
        draws, limits = Draws(settings.temperature or 1.0, seed=2), DraftLimits(VOCABULARY)
        reader = ModelReader(DraftModel(draft_model()))
        fusing = DrawnFusion([embedded()], limits, readers=[reader], draws=draws, costs=_FREE)
        rule = accept_rule(replace(settings, coupled=False))
        drafters: dict[str, Drafter] = {"draft model": of_model(draws), "fused": fusing}
        for kind, each in drafters.items():
            for number, ran in enumerate(together(subject.decoder(each, accept=rule), requests)):
                yield subject.here(f"{name}/uncoupled/{kind}/{number}", ran.tokens)
                yield subject.here(f"{name}/uncoupled/{kind}/{number}/verified", ran.verified)


def constrained(subject: Subject) -> Iterator[Step]:
    """Keep outputs to an expression or a schema; greedy ones are those that `generate` gives."""
    tokenizer = fast_tokenizer()
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["n", "b"],
        "additionalProperties": False,
    }
    grammars = {
        "expression": Grammar.of_regex("(ab|ü)+[0-9]{2,9}[a-f]{9}", tokenizer, (0,)),
        "schema": Grammar.of_json_schema(schema, tokenizer, (0,)),
    }
    for name, grammar in grammars.items():
        truth = _within(subject, grammar)
        drafter = ScriptedDrafter(oracle([*PROMPTS[0], *truth]))
        for settings in (SamplingSettings(), SamplingSettings(1.0, seed=3)):
            rule = accept_rule(settings, (), grammar)
            tokens = alone(subject.decoder(drafter, accept=rule, stop_ids=[0]), PROMPTS[0]).tokens
            assert not settings.is_greedy or tokens == truth, f"{name}: {tokens}, not {truth}"
            yield subject.here(f"{name}/{'greedy' if settings.is_greedy else 'drawn'}", tokens)


def _within(subject: Subject, grammar: Grammar) -> list[int]:
    """Return what plain `generate` gives among the tokens that a grammar allows."""
    prompt = PROMPTS[0]

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        state = grammar.start()
        for token in tokens[len(prompt) :].tolist():
            state = grammar.advance(state, token)
        found: list[int] = torch.nonzero(grammar.allowed(state))[:, 0].tolist()
        return found

    output = called(subject, [prompt], prefix_allowed_tokens_fn=allowed, eos_token_id=0)
    return new_rows(output, [prompt])[0]


# Inside transformers.


def called(subject: Subject, prompts: Sequence[list[int]], **options: Any) -> Any:
    """Call `model.generate` for a batch that is padded on the left."""
    width = max(map(len, prompts))
    generate: Any = subject.model.generate
    return generate(
        torch.tensor([[PAD] * (width - len(p)) + p for p in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        **{"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": PAD, **options},
    )


def new_rows(output: torch.Tensor, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return what was generated of each row."""
    rows: list[list[int]] = output[:, max(map(len, prompts)) :].tolist()
    return rows


_CALLS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "stop tokens": {"eos_token_id": STOPS},
    "criteria": {"stopping_criteria": StoppingCriteriaList([EndsAfter(17)]), "eos_token_id": 47},
    "length": {"max_length": 60},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[9]]},
    "guidance": {"guidance_scale": 1.7},
    "least length": {"min_new_tokens": 6, "eos_token_id": STOPS, "sequence_bias": [[[5], 3.0]]},
}
"""Greedy calls; those from `processors` on change what is most probable."""


def batches(subject: Subject) -> Iterator[Step]:
    """Have `generate` decode a padded batch."""
    for name, options in _CALLS.items():
        is_plain = list(_CALLS).index(name) < list(_CALLS).index("processors")
        output = called(subject, PROMPTS, **options)
        expected = new_rows(output, PROMPTS)
        wholes = [[*p, *row] for p, row in zip(PROMPTS, expected, strict=True)]
        plugin = plugged(subject, ScriptedDrafter(any_of(wholes)), parallel=3)
        found = new_rows(called(subject, PROMPTS, custom_generate=plugin, **options), PROMPTS)
        for number, row in enumerate(found):
            if is_plain:
                yield subject.greedy(f"{name}/{number}", PROMPTS[number], row, expected[number])
            else:
                assert row == expected[number], f"{name}/{number}: {row}, not {expected[number]}"
                yield subject.here(f"{name}/{number}", row)
        if is_plain:
            yield exact(f"{subject.path}/{name}/counts", counts(plugin.statistics))


def plugged(subject: Subject, drafter: Drafter, **options: Any) -> Foredraft:
    """Return what decodes inside `generate`, with a fixed budget."""
    return Foredraft(subject.model, drafter, budget=FixedBudget(NODES), **options)


def plugins(subject: Subject) -> Iterator[Step]:
    """Have `generate` decode with what it takes besides: streamers, predictions, assistants."""
    prompt = PROMPTS[0]
    truth, listener = subject.truth(prompt), Listener()
    folder, assistant = official_eagle3().write(subject.scratch), draft_model()
    costs = CostSurface((0, 64), (1, 64), ((1.0, 1.0), (1.0, 1.0)))
    custom_generate._curves[subject.model] = {json.dumps(key_of(subject.model)): costs}
    script = ScriptedDrafter(perfect(prompt + truth))
    calls: dict[str, dict[str, Any]] = {
        "streamer": {"custom_generate": plugged(subject, script), "streamer": listener},
        "function": {"custom_generate": foredraft_generate, "drafter": script},
        "predictions": {"predictions": [Prediction(np.array(truth, np.int32), "")]},
        "budget": {"budget": 3},
        "group": {"options": SequenceOptions(group="samples")},
        "no drafts": {"drafts": False},
        "tenant": {"options": SequenceOptions(tenant="a")},
        "assistant": {"custom_generate": plugged(subject, embedded(), assistant_model=assistant)},
        "head": {"custom_generate": plugged(subject, NoDrafter(), speculator=folder)},
    }
    by_time = {"function", "assistant", "head"}  # what is drafted depends on what passes took
    for name, stated in calls.items():
        options = {"custom_generate": plugged(subject, embedded()), **stated}
        [tokens] = new_rows(called(subject, [prompt], **options), [prompt])
        yield subject.greedy(name, prompt, tokens)
        if name not in by_time:
            yield subject.here(f"{name}/counts", figures(options["custom_generate"].statistics))
    told = [each if isinstance(each, list) else [each] for each in listener.told]
    yield exact(f"{subject.path}/streamer/told", told)


_DRAWN_CALLS: Final[dict[str, dict[str, Any]]] = {
    "temperature": {"temperature": 1.3},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8, "top_k": 0},
    "min-p": {"min_p": 0.1},
    "penalty": {"repetition_penalty": 1.2, "eos_token_id": STOPS},
}


def drawn_batches(subject: Subject) -> Iterator[Step]:
    """Have `generate` draw two outputs of each of several prompts, the same with any drafts."""
    for name, options in _DRAWN_CALLS.items():
        found = []
        for drafter in (ScriptedDrafter(nothing), ScriptedDrafter(every_token), embedded()):
            torch.manual_seed(11)
            plugin = plugged(subject, drafter)
            asked = {"do_sample": True, "num_return_sequences": 2, **options}
            output = called(subject, PROMPTS[:3], custom_generate=plugin, **asked)
            found.append(new_rows(output, PROMPTS[:3]))
            number = len(found) - 1
            yield subject.here(f"{name}/{number}/counts", figures(plugin.statistics))
        assert found[0] == found[1] == found[2], f"{name}: drawn outputs depend on drafts"
        for number, row in enumerate(found[0]):
            yield subject.here(f"{name}/{number}", row)
    torch.manual_seed(11)
    plugin = plugged(subject, of_model(Draws(seed=3)), draft_sampling=True)
    output = called(subject, PROMPTS[:1], custom_generate=plugin, do_sample=True)
    yield subject.here("uncoupled", new_rows(output, PROMPTS[:1])[0])
    yield subject.here("uncoupled/counts", figures(plugin.statistics))


_MODELS: Final[dict[str, Callable[[], PreTrainedModel]]] = {
    "llama": partial(tiny_llama, layers=3),
    "gemma": partial(tiny_gemma, layers=3),
    "mamba": tiny_mamba,
    "convolution": tiny_convolution,
    "bytes": byte_llama,
    "llama bfloat16": lambda: tiny_llama(dtype=torch.bfloat16, layers=3),
    "gemma bfloat16": lambda: tiny_gemma(dtype=torch.bfloat16, layers=3),
    "eager gemma": lambda: tiny_gemma("eager", layers=3),
    "qwen3": partial(tiny_model, "qwen3"),
    "gpt_neox": partial(tiny_model, "gpt_neox"),
}
_TREES: Final = ("llama", "gemma")
_WITH_BFLOAT16: Final = (*_TREES, "llama bfloat16", "gemma bfloat16")
_ALL: Final = tuple(name for name in _MODELS if name != "bytes")


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode.

    Attributes:
        steps: yields what is recorded of a model.
        models: by name.
        small: those of the small record; in float32 all steps of such a mode hold everywhere.
    """

    steps: Callable[[Subject], Iterator[Step]]
    models: Sequence[str]
    small: Sequence[str] = ()


MODES: Final = {
    "trees": Mode(trees, _ALL, small=("gemma",)),
    "packed": Mode(packed, _ALL, small=("gemma",)),
    "stops": Mode(stops, _ALL, small=("llama", "mamba")),
    "stop strings": Mode(stop_strings, ("bytes",), small=("bytes",)),
    "chat": Mode(chat, _TREES, small=("gemma",)),
    "ahead": Mode(ahead, _TREES, small=("llama",)),
    "batches": Mode(batches, (*_TREES, "mamba")),
    "retrieval": Mode(retrieval, _WITH_BFLOAT16),
    "predictions": Mode(predictions, _TREES),
    "groups": Mode(groups, ("llama",)),
    "fusion": Mode(fusion, ("llama",)),
    "drawn": Mode(drawn, ("llama",)),
    "constrained": Mode(constrained, ("bytes",)),
    "plugins": Mode(plugins, ("llama",)),
    "drawn batches": Mode(drawn_batches, ("llama",)),
}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread, and keep nothing that other runs measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with patch.dict(os.environ, {CACHE_VARIABLE: "none"}):
            yield
    finally:
        torch.set_num_threads(threads)


def steps(scope: Scope) -> Iterator[Step]:
    """Yield the steps of all modes, model by model."""
    with _one_thread():
        for name, make in _MODELS.items():
            chosen = {
                each: mode.small if scope.small else mode.models for each, mode in MODES.items()
            }
            named = [each for each, models_of_mode in chosen.items() if name in models_of_mode]
            if not named:
                continue
            folder = scope.scratch / name
            folder.mkdir()
            subject = Subject(f"outputs/{name}", make(), folder)
            for each in named:
                yield from MODES[each].steps(replace(subject, path=f"{subject.path}/{each}"))
