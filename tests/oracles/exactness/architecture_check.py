"""One architecture with hostile drafts: whether the decoder writes what `model.generate` writes."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.errors import DecoderError
from decoder.loop import Decoder
from decoder.model import target as target_module
from decoder.model.compatibility import Capability, Compatibility, layers_of
from decoder.model.target import Target
from indexer.errors import reason_of
from retriever.tree import DraftTree
from tests.oracles.exactness.hostile_drafts import HOSTILE, Foreteller, right_chain
from tests.oracles.exactness.tiny_models import FIRST_FREE, VOCABULARY, tiny_model

LENGTHS: Final = ((3, 36), (30, 16))
"""Tokens of prompt and output: one crosses the windows while it decodes, one has them behind it."""

REFUSED: Final = "refused"
UNABLE: Final = "generate fails"
UNMADE: Final = "not made"

_TIE: Final = 1e-4
_ROUNDING: Final = 1e-3
_BUDGET: Final = 256


@dataclass(slots=True)
class Finding:
    """What was found of an architecture.

    Attributes:
        architecture: its model type.
        name: of its class, empty where it could not be made.
        verifies: trees, chains or plain tokens; or why it does none of it: refused by us,
            transformers' own `generate` fails, or it cannot be made here.
        reason: why not trees.
        differences: outputs that are not those of `generate`, with how far apart the two best
            logits are there.
        beyond: what becomes of drafts that the reason excludes, where they are verified all the
            same; empty where nothing is wrong with them, so that the reason would be false.
        distinct: tokens of the outputs that differ from one another.
        tokens_per_pass: with drafts that are right.
    """

    architecture: str
    name: str = ""
    verifies: str = UNMADE
    reason: str = ""
    differences: list[str] = field(default_factory=list)
    beyond: str = ""
    distinct: int = 0
    tokens_per_pass: float = 0.0

    def report(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @property
    def is_sound(self) -> bool:
        """Whether all outputs are those of `generate`, and a reason against drafts is true."""
        if self.verifies not in {REFUSED, UNABLE, UNMADE, *_NAMES}:
            return False
        is_refusal = self.verifies in {REFUSED, *_NAMES[:-1]}
        return not self.differences and (bool(self.beyond) or not is_refusal)


_NAMES: Final = tuple(each.name.lower() for each in Capability)
"""Plain, chains, trees."""


def examined(architecture: str) -> Finding:
    """Make a tiny model of an architecture and decode with it."""
    try:
        model = tiny_model(architecture)
    except Exception as error:  # noqa: BLE001  each configuration raises its own
        return Finding(architecture, reason=reason_of(error))
    return examined_model(model, Finding(architecture, type(model).__name__))


def examined_model(model: PreTrainedModel, finding: Finding) -> Finding:
    """Fill in what is found of a model."""
    try:
        cases = [_Case.of(model, *lengths) for lengths in LENGTHS]
    except Exception as error:  # noqa: BLE001  each model raises its own
        finding.verifies, finding.reason = UNABLE, reason_of(error)
        finding.differences = list(_unclear_refusals(model))
        return finding
    finding.distinct = len({token for case in cases for token in case.output})
    try:
        target = Target(model)
    except DecoderError as error:
        finding.verifies, finding.reason = REFUSED, str(error)
        finding.beyond = _beyond(model, cases, Capability.PLAIN)
        return finding
    finding.verifies, finding.reason = target.capability.name.lower(), target.reason
    finding.differences = list(_differences(target, model, cases))
    if not finding.differences:
        finding.tokens_per_pass = _tokens_per_pass(target, cases[0])
    if target.capability < Capability.TREES:
        finding.beyond = _beyond(model, cases, Capability(target.capability + 1))
    return finding


def _unclear_refusals(model: PreTrainedModel) -> Iterator[str]:
    """Make a target of a model that does not run: it may be refused, but by an error of ours."""
    try:
        Target(model)
    except DecoderError:
        pass
    except Exception as error:  # noqa: BLE001  each model raises its own
        yield f"no clear refusal: {reason_of(error)}"


@dataclass(frozen=True, slots=True)
class _Case:
    """A prompt and what `generate` writes behind it."""

    prompt: list[int]
    output: list[int]

    @classmethod
    def of(cls, model: PreTrainedModel, length: int, num_new: int) -> "_Case":
        rng = np.random.default_rng(length)
        prompt = rng.integers(FIRST_FREE, VOCABULARY, length).tolist()
        config = GenerationConfig(  # type: ignore[no-untyped-call]  # not typed there
            do_sample=False, max_new_tokens=num_new, pad_token_id=0
        )
        tokens = torch.tensor([prompt])
        generate: Any = model.generate
        output = generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
        return cls(prompt, output[0, length:].tolist())


def _decoder(target: Target, case: _Case, drafts: str) -> Decoder:
    drafter = Foreteller([*case.prompt, *case.output], HOSTILE[drafts])
    return Decoder(target, drafter, FixedBudget(_BUDGET))


def _decoded(decoder: Decoder, case: _Case) -> list[int]:
    return [t for step in decoder.generate(case.prompt, len(case.output)) for t in step]


def _differences(target: Target, model: PreTrainedModel, cases: list[_Case]) -> Iterator[str]:
    """Decode with all drafts and say what differs."""
    for case in cases:
        for drafts in HOSTILE:
            try:
                found = _decoded(_decoder(target, case, drafts), case)
            except Exception as error:  # noqa: BLE001  each model raises its own
                yield f"{drafts} drafts: {reason_of(error)}"
                continue
            difference = _parted(model, case, found)
            if difference:
                yield f"{drafts} drafts behind {len(case.prompt)} tokens: {difference}"


def _parted(model: PreTrainedModel, case: _Case, found: list[int]) -> str:
    """Say where an output parts from that of `generate`; empty where it does not, but for ties."""
    if found == case.output:
        return ""
    pairs = enumerate(zip(case.output, found, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), None)
    if at is None:
        return f"{len(found)} tokens, not {len(case.output)}"
    gap = _gap(model, [*case.prompt, *case.output[:at]])
    return "" if gap is not None and gap < _TIE else f"token {at} differs, gap {gap}"


def _gap(model: PreTrainedModel, tokens: list[int]) -> float | None:
    """Return how far apart the two best logits are, `None` where a pass fails.

    They are computed in float64 where that is possible: some kernels know single precision only.
    """
    for dtype in (torch.float64, torch.float32):
        precise: Any = copy.deepcopy(model).to(dtype)  # type: ignore[arg-type]  # wrapped without its types
        try:
            with torch.inference_mode():
                logits = precise(input_ids=torch.tensor([tokens])).logits[0, -1]
        except Exception:  # noqa: BLE001, S112  each model raises its own
            continue
        best, second = logits.topk(2).values.tolist()
        return float(best - second)
    return None


def _tokens_per_pass(target: Target, case: _Case) -> float:
    generation = _decoder(target, case, "right").generate(case.prompt, len(case.output))
    for _ in generation:
        pass
    return round(generation.statistics.tokens_per_pass, 2)


def _believing(model: PreTrainedModel, capability: Capability) -> Target:
    """Return a target that believes that a model verifies so much."""
    layers = None if capability is Capability.PLAIN else layers_of(model)
    if capability is Capability.CHAINS and layers is not None:
        layers = tuple((kind, None) for kind, _ in layers)
    promised = Compatibility(capability, "", layers)
    with patch.object(target_module, "compatibility_of", lambda _: promised):
        return Target(model, verdicts=None)


def _beyond(model: PreTrainedModel, cases: list[_Case], capability: Capability) -> str:
    """Return what goes wrong where a model is made to verify more, empty if nothing does."""
    if capability is Capability.TREES and layers_of(model) is None:
        return "only keys and values can be moved to where a path of a tree belongs"
    try:
        target = _believing(model, capability)
        found = next(_differences(target, model, cases), "")
        if found or capability is not Capability.CHAINS:
            return found
        return _other_logits(target, _believing(model, Capability.PLAIN), cases[0])
    except Exception as error:  # noqa: BLE001  each model raises its own
        return reason_of(error)


def _other_logits(drafted: Target, plain: Target, case: _Case) -> str:
    """Compare logits of a chain with those of single tokens; greedy outputs may hide much."""
    prompt, chain = np.array(case.prompt[:-1], np.int32), case.output[:4]
    drafted.prefill(prompt)
    rows = drafted.verify(case.prompt[-1], right_chain(chain))
    plain.prefill(prompt)
    expected = []
    for token in [case.prompt[-1], *chain]:
        expected.append(plain.verify(token, DraftTree.empty()))
        plain.commit(np.zeros(0, np.int64))
    largest = float((rows - torch.cat(expected)).abs().max())
    return f"logits of a chain differ by {largest:.2g}" if largest > _ROUNDING else ""
