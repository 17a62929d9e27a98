"""What a call of `model.generate` states of its drafts reaches the drafter, and no output."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.drafters.asking import AskingRule
from decoder.drafters.following import NoDrafter
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.recycling import RecycledLogits
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.errors import (
    ContradictoryOptionsError,
    InvalidPromptError,
    InvalidSettingsError,
    UnsupportedEngineError,
)
from decoder.model.stamp import model_changed
from retriever.drafter import DEFAULT, FORGOTTEN, Drafter, Prediction, SequenceOptions
from retriever.errors import InvalidRequestError, VocabularyMismatchError
from retriever.follower import DraftLimits
from retriever.sessions.embedded import EmbeddedDrafter
from tests.decoder.decoding import VOCABULARY, plainly, prompt_of, tiny_llama
from tests.decoder.engines.transformers.generating import foredraft, generated

PROMPT = prompt_of(12)
NEW_TOKENS = 32


def decoded(drafting: Foredraft, model: PreTrainedModel, **stated: Any) -> tuple[int, int]:
    """Check the output; return how many nodes were drafted for it, and how many accepted."""
    before = drafting.statistics.num_drafted, drafting.statistics.num_accepted
    options = {"custom_generate": drafting, "max_new_tokens": NEW_TOKENS, **stated}
    tokens = generated(model, PROMPT, **options)[0].tolist()
    assert tokens[len(PROMPT) :] == plainly(model, PROMPT, NEW_TOKENS)
    after = drafting.statistics.num_drafted, drafting.statistics.num_accepted
    return after[0] - before[0], after[1] - before[1]


def test_each_field_reaches_the_drafter() -> None:
    model, drafter = tiny_llama(), EmbeddedDrafter()
    drafting = foredraft(model, drafter)
    decoded(drafting, model, options=FORGOTTEN)
    cold = decoded(drafting, model)[1]  # nothing was kept of the call before
    warm = decoded(drafting, model)[1]
    assert warm > cold
    assert decoded(drafting, model, drafts=False) == (0, 0)
    drafted, accepted = decoded(drafting, model, budget=1)
    assert 0 < drafted <= NEW_TOKENS
    assert 0 < accepted <= warm
    assert decoded(drafting, model, budget=0) == (0, 0)
    assert decoded(drafting, model, options=SequenceOptions(group="samples"))[1] > cold


def test_tenants_draft_from_their_own_outputs_alone() -> None:
    model = tiny_llama()
    drafting = foredraft(model, EmbeddedDrafter())
    first = decoded(drafting, model, options=SequenceOptions(tenant="a"))
    again = decoded(drafting, model, options=SequenceOptions(tenant="a"))
    other = decoded(drafting, model, options=SequenceOptions(tenant="b"))
    assert again[1] > first[1]
    assert other == first


def test_what_was_found_likely_for_one_tenant_is_not_drafted_for_another() -> None:
    limits = DraftLimits(VOCABULARY, VOCABULARY)
    fused = FusedDrafter([EmbeddedDrafter()], limits, recycled=RecycledLogits())
    model = tiny_llama()
    drafting = foredraft(model, fused)
    decoded(drafting, model, options=SequenceOptions(tenant="a"))
    decoded(drafting, model, options=SequenceOptions(tenant="a"))
    with pytest.raises(InvalidRequestError, match="recycled logits for each"):
        decoded(drafting, model, options=SequenceOptions(tenant="b"))
    decoded(drafting, model, options=SequenceOptions(tenant="a"))


def test_what_cannot_be_followed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    drafting = foredraft(model, EmbeddedDrafter())
    with caplog.at_level(logging.WARNING):
        decoded(drafting, model, budget=10**6)
    assert "budget of 1000000 nodes is cut to" in caplog.text
    with pytest.raises(InvalidSettingsError, match="0 nodes or more, not -1"):
        decoded(drafting, model, budget=-1)
    foreign = Prediction(np.array([VOCABULARY + 7], np.int32), "plan")
    with pytest.raises(InvalidPromptError, match="plan"):
        decoded(drafting, model, predictions=[foreign])
    with pytest.raises(InvalidPromptError, match="tenant"):
        decoded(drafting, model, options=SequenceOptions(tenant="a" * 10_000))
    for keeps_none_apart in (NoDrafter(),):
        with pytest.raises(InvalidRequestError, match="not keep tenants apart"):
            decoded(foredraft(model, keeps_none_apart), model, options=SequenceOptions(tenant="a"))
    decoded(drafting, model)


def with_assistant(drafter: Drafter, **more: Any) -> tuple[PreTrainedModel, Foredraft]:
    model = tiny_llama()
    return model, Foredraft(
        model, drafter, budget=FixedBudget(16), assistant_model=tiny_llama(), **more
    )


def test_an_assistant_model_drafts_beside_retrieval_in_one_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The assistant is the model itself, so that nearly all of what it proposes is accepted."""
    monkeypatch.setattr(AskingRule, "asks", lambda *_: True)  # its time would not pay here
    monkeypatch.setattr(AskingRule, "is_worthwhile", lambda *_: True)
    model, drafting = with_assistant(NoDrafter())
    decoded(drafting, model)
    alone = drafting.statistics.tokens_per_pass
    assert alone > 3
    assert drafting.statistics.accepted_by_source().keys() == {"model"}
    model, both = with_assistant(EmbeddedDrafter())
    for _ in range(3):
        decoded(both, model)
    assert both.statistics.tokens_per_pass > 0.9 * alone
    assert {"model", "generations"} <= both.statistics.accepted_by_source().keys()


def test_assistants_that_cannot_be_used_are_refused() -> None:
    fused = FusedDrafter([NoDrafter()], DraftLimits(VOCABULARY, VOCABULARY))
    with pytest.raises(ContradictoryOptionsError, match="readers="):
        with_assistant(fused)
    smaller: Any = tiny_llama()
    smaller.resize_token_embeddings(VOCABULARY // 2)
    with pytest.raises(VocabularyMismatchError):
        Foredraft(tiny_llama(), NoDrafter(), budget=FixedBudget(16), assistant_model=smaller)


def later_generate(self: Any, inputs: Any = None, decoding: Any = None, **options: Any) -> Any: ...


def test_a_transformers_that_calls_otherwise_is_refused_with_what_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama()
    with monkeypatch.context() as other_version:
        other_version.setattr(GenerationMixin, "generate", later_generate)
        with pytest.raises(UnsupportedEngineError) as caught:
            foredraft(model, NoDrafter())
    assert "generate has no parameter `custom_generate`" in str(caught.value)
    assert "generate has no parameter `streamer`" in str(caught.value)


class Spying(EmbeddedDrafter):
    """Writes down of which version of the policy sequences are."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[int | None] = []

    def open(self, session: str, prompt: Any, options: SequenceOptions = DEFAULT) -> None:
        self.versions.append(options.policy_version)
        super().open(session, prompt, options)


@torch.no_grad()
def test_versions_of_a_policy_follow_its_weights_where_they_are_counted() -> None:
    model, drafter = tiny_llama(), Spying()
    drafting = Foredraft(model, drafter, budget=FixedBudget(8), counts_versions=True)
    weight: Any = model.get_parameter("lm_head.weight")

    def write_unseen() -> None:
        weight.data.mul_(1.01)
        model_changed()

    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: None,
        lambda: weight.mul_(1.01),
        lambda: model.load_state_dict(tiny_llama().state_dict()),
        write_unseen,
        lambda: None,
    ]
    for change in changes:
        change()
        generated(model, PROMPT, custom_generate=drafting)
    generated(model, PROMPT, custom_generate=drafting, options=SequenceOptions(policy_version=7))
    assert drafter.versions == [0, 0, 1, 2, 3, 3, 7]
    generated(model, PROMPT, custom_generate=foredraft(model, drafter))
    assert drafter.versions[-1] is None
