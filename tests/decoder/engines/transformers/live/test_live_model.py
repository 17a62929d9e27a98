"""Outputs with drafts are those of `generate` by the model as it is, whatever was done to it."""

import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from decoder.budget.budget import FixedBudget
from decoder.drafters.following import NoDrafter
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.errors import ModelChangedError, WeightsNotLoadedError
from decoder.model.stamp import model_changed
from decoder.model.user_model import cache_argument
from retriever.drafter import Drafter
from tests.decoder.decoding import ScriptedDrafter, at_random, oracle
from tests.decoder.engines.transformers.live.model_changes import (
    CHANGES,
    UNSEEN,
    for_all_models,
    tiny,
)
from tests.suite_parts import cases, draws_all_cases

PROMPT: Final = torch.randint(3, 250, (1, 60), generator=torch.Generator().manual_seed(1))
OTHER: Final = torch.randint(3, 250, (1, 40), generator=torch.Generator().manual_seed(2))
NEW_TOKENS: Final = 12

Change = Callable[[Any], None]


@pytest.fixture(autouse=True)
def _weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack the weights of tiny models, too, so that stale copies would show."""
    monkeypatch.setattr("decoder.model.user_model.LEAST_WEIGHTS", {torch.float32: 1})


def written(model: Any, prompt: torch.Tensor = PROMPT, **options: Any) -> list[int]:
    torch.manual_seed(5)
    found: torch.Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return found[0, prompt.shape[1] :].tolist()


def drafting(model: Any, truth: list[int] | None = None) -> Foredraft:
    drafter: Drafter = ScriptedDrafter(
        at_random() if truth is None else oracle(PROMPT[0].tolist() + truth)
    )
    return Foredraft(model, drafter, budget=FixedBudget(12))


@cache
def unchanged() -> list[int]:
    """Return what the model writes as it is made."""
    return written(tiny())


def pair(change: Change) -> tuple[Any, list[int]]:
    """Return a model and what `generate` writes after the change."""
    changed = tiny()
    change(changed)
    return tiny(), written(changed)


def before_wrapping(change: Change) -> tuple[list[int], list[int]]:
    model, expected = pair(change)
    change(model)
    return written(model, custom_generate=drafting(model, expected)), expected


def before_use(change: Change) -> tuple[list[int], list[int]]:
    model, expected = pair(change)
    plugin = drafting(model, expected)
    change(model)
    return written(model, custom_generate=plugin), expected


def after_use(change: Change, first: torch.Tensor = PROMPT) -> tuple[list[int], list[int]]:
    model, expected = pair(change)
    plugin = drafting(model, expected)
    for _ in range(2):
        written(model, first, custom_generate=plugin)
    change(model)
    return written(model, custom_generate=plugin), expected


def after_another_prompt(change: Change) -> tuple[list[int], list[int]]:
    return after_use(change, OTHER)


class Changing(BaseStreamer):
    """Changes a model at a token in the middle of a pass, as far as that is known here."""

    def __init__(self, model: Any, change: Change, *, says: bool, num_before: int = 5) -> None:
        self._model, self._change, self._says = model, change, says
        self._num_left = num_before  # the prompt counts

    def put(self, _: Any) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._change(self._model)
            if self._says:
                model_changed()

    def end(self) -> None:
        """Nothing is left to do."""


def in_a_callback(change: Change) -> tuple[list[int], list[int]]:
    says = change in UNSEEN.values()
    other, model = tiny(), tiny()
    expected = written(other, streamer=Changing(other, change, says=says))
    plugin = drafting(model, expected)
    streamer = Changing(model, change, says=says)
    return written(model, custom_generate=plugin, streamer=streamer), expected


MOMENTS: Final = (before_wrapping, before_use, after_use, after_another_prompt, in_a_callback)
ALL: Final = {**CHANGES, **UNSEEN}
REFUSED: Final = {
    "enlarge": "was cast, moved or resized",
    "shrink": "was cast, moved or resized",
    "to double": "was cast, moved or resized",  # by torch, if it is not drafted for
    "train with checkpoints": "now verifies",  # in that mode transformers keeps no cache
}
"""Changes with which a generation cannot go on that has begun without."""
WITHOUT_EFFECT: Final = frozenset(
    {
        *("hook and unhook", "wrap forward", "checkpoint gradients", "train mode", "freeze"),
        *("eager attention", "ask for states", "rename labels", "disable adapter"),
        *("remove adapter", "round trip", "to double", "enlarge"),
    }
)
"""Changes with which a model writes what it wrote; all others would prove nothing if it did."""
BY_RELEASE: Final = frozenset({"train with checkpoints"})
"""Changes whose effect depends on the release of transformers."""


def rows() -> Iterator[Any]:
    """Each change at one moment, in turn, or at all of them where all cases are drawn."""
    for at, name in enumerate(ALL):
        moments = MOMENTS if draws_all_cases() else (MOMENTS[(at + 2) % len(MOMENTS)],)
        for moment in moments:
            yield pytest.param(moment, name, id=f"{name}, {moment.__name__}")


@pytest.mark.seeds
@pytest.mark.parametrize(("moment", "name"), [*rows()])
def test_the_output_is_that_of_the_model_as_it_is(
    moment: Callable[[Change], tuple[list[int], list[int]]], name: str
) -> None:
    change = ALL[name]
    if moment is in_a_callback and name in REFUSED:
        model = tiny()
        streamer = Changing(model, change, says=False)
        with pytest.raises(ModelChangedError, match=REFUSED[name]):
            written(model, custom_generate=drafting(model), streamer=streamer)
        return
    found, expected = moment(change)
    assert found == expected
    changed = pair(change)[1] if moment is in_a_callback else expected
    assert (changed == unchanged()) == (name in WITHOUT_EFFECT) or name in BY_RELEASE


def test_what_all_models_share_is_as_it_is() -> None:
    model = tiny()
    plugin = drafting(model)
    plain = written(model)
    assert written(model, custom_generate=plugin) == plain
    with for_all_models() as calls:
        changed = written(model)
        calls.clear()
        assert written(model, custom_generate=plugin) == changed
        assert calls
    assert changed != plain
    assert written(model, custom_generate=plugin) == plain


@pytest.mark.seeds
def test_random_changes_in_random_order_at_random_moments() -> None:
    for seed in range(cases(2, of=60)):
        rng = np.random.default_rng(seed)
        plain, drafted = tiny(), tiny()
        plugin = drafting(drafted)
        done: list[str] = []
        for name in rng.choice([each for each in ALL if each not in REFUSED], 4):
            prompt = (PROMPT, OTHER)[int(rng.integers(2))]
            done.append(str(name))
            listeners: list[Changing | None] = [None, None]
            if rng.random() < 0.3:
                says = name in UNSEEN
                listeners = [Changing(each, ALL[name], says=says) for each in (plain, drafted)]
            try:
                if listeners[0] is None:
                    ALL[name](plain)
                expected = written(plain, prompt, streamer=listeners[0])
            except (RuntimeError, AttributeError):  # earlier ones left nothing that it can change
                break
            if listeners[1] is None:
                ALL[name](drafted)
            found = written(drafted, prompt, streamer=listeners[1], custom_generate=plugin)
            assert found == expected, (seed, done)


def test_with_nothing_looked_at_again_changes_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: weights keep their packed copies, and callbacks are believed to change nothing."""
    monkeypatch.setattr("decoder.model.products._Entry.has_moved", lambda *_: False)
    monkeypatch.setattr("decoder.model.products.Products.audit", lambda _: False)
    found, expected = after_use(CHANGES["add to all"])
    assert found != expected
    monkeypatch.undo()
    monkeypatch.setattr("decoder.model.user_model.LEAST_WEIGHTS", {torch.float32: 1})
    monkeypatch.setattr("decoder.model.target.Target.has_changed", lambda _: False)
    found, expected = in_a_callback(CHANGES["add to all"])
    assert found != expected
    monkeypatch.undo()
    monkeypatch.setattr("decoder.model.user_model.LEAST_WEIGHTS", {torch.float32: 1})
    monkeypatch.setattr("decoder.model.products.Products.audit", lambda _: False)
    found, expected = after_use(UNSEEN["multiply data"])
    assert found != expected


def test_a_change_of_modules_does_not_hide_one_of_contents(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The check of the new modules must not run by packed weights of before."""

    def both(model: Any) -> None:
        CHANGES["hook on mlp"](model)
        UNSEEN["multiply data"](model)

    found, expected = after_use(both)
    assert found == expected
    assert "is decoded without drafts" not in caplog.text


def test_a_number_that_changes_within_a_pass_counts_from_the_next_token() -> None:
    """Whichever token of an accepted draft it is at which a callback changes it."""

    def blur(model: Any) -> None:
        model.model.layers[0].input_layernorm.variance_epsilon = 10.0

    changed = set()
    for num_before in range(2, NEW_TOKENS, 3):
        other, model = tiny(), tiny()
        changing = [
            Changing(each, blur, says=False, num_before=num_before) for each in (other, model)
        ]
        expected = written(other, streamer=changing[0])
        plugin = drafting(model, unchanged())
        assert written(model, custom_generate=plugin, streamer=changing[1]) == expected
        changed.add(tuple(expected))
    assert len(changed) > NEW_TOKENS // 6


def test_a_training_loop_decodes_between_its_steps() -> None:
    """Rollouts of a policy, with its optimizer's steps between them."""
    plain, drafted = tiny(), tiny()
    plugin = drafting(drafted)
    outputs = []
    for _ in range(4):
        outputs.append(written(plain))
        assert written(drafted, custom_generate=plugin) == outputs[-1]
        for model in (plain, drafted):
            CHANGES["train by adam"](model)
    assert len({tuple(each) for each in outputs}) == 4


def test_dropout_is_what_plain_generation_makes_of_it(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny().train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    expected = written(model)
    plugin = drafting(model)
    assert written(model, custom_generate=plugin) == expected
    assert "LlamaForCausalLM is decoded without drafts" in caplog.text
    model.eval()
    assert written(model, custom_generate=plugin) == written(model) != expected


class Ending(StoppingCriteria):
    """Changes the model while it decides."""

    def __init__(self, model: Any, change: Change) -> None:
        self._model, self._change = model, change
        self._num_calls = 0

    def __call__(self, input_ids: torch.Tensor, _: Any, **__: Any) -> Any:
        self._num_calls += 1
        if self._num_calls == 5:
            self._change(self._model)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Processing:
    """Changes the model before a token is chosen."""

    def __init__(self, model: Any, change: Change) -> None:
        self._model, self._change = model, change
        self._num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._num_calls += 1
        if self._num_calls == 5:
            self._change(self._model)
        return scores - 0.1 * (torch.arange(scores.shape[-1]) == input_ids[0, -1])


@pytest.mark.parametrize("name", ["add to all", "replace mlp", "hook on mlp", "bind mlp"])
@pytest.mark.parametrize("samples", [False, True])
def test_criteria_and_processors_may_change_the_model(name: str, *, samples: bool) -> None:
    def options(model: Any) -> dict[str, Any]:
        return {
            "stopping_criteria": StoppingCriteriaList([Ending(model, CHANGES[name])]),
            "logits_processor": [Processing(model, CHANGES["copy into one"])],
        }

    if samples:
        found = []
        for guess in (at_random(), None):
            model = tiny()
            drafter: Any = NoDrafter() if guess is None else ScriptedDrafter(guess)
            plugin = Foredraft(model, drafter, budget=FixedBudget(12))
            torch.manual_seed(4)
            found.append(
                model.generate(
                    PROMPT,
                    attention_mask=torch.ones_like(PROMPT),
                    max_new_tokens=NEW_TOKENS,
                    do_sample=True,
                    pad_token_id=0,
                    custom_generate=plugin,
                    **options(model),
                ).tolist()
            )
        assert found[0] == found[1]  # a seed draws the same with and without drafts
        return
    plain, drafted = tiny(), tiny()
    expected = written(plain, **options(plain))
    plugin = drafting(drafted, expected)
    assert written(drafted, custom_generate=plugin, **options(drafted)) == expected


def test_errors_of_a_model_keep_their_names() -> None:
    model = tiny()
    plugin = drafting(model)

    def failing(*_: Any) -> None:
        raise ZeroDivisionError("in a hook")

    written(model, custom_generate=plugin)
    handle = model.model.layers[1].register_forward_hook(failing)
    with pytest.raises(ZeroDivisionError, match="in a hook"):
        written(model, custom_generate=plugin)
    with pytest.raises(ZeroDivisionError, match="in a hook"):
        written(model)
    handle.remove()

    def stopping(*_: Any) -> None:
        raise StopIteration

    handle = model.model.layers[1].register_forward_hook(stopping)
    with pytest.raises(StopIteration):
        written(model, custom_generate=plugin)
    handle.remove()
    assert written(model, custom_generate=plugin) == written(model)


def test_a_forward_that_takes_less_is_asked_for_less() -> None:
    name = cache_argument(tiny())

    def forward(model: Any, input_ids: Any, **given: Any) -> Any:
        kind = type(model).forward
        return kind(model, input_ids=input_ids, **{name: given.get(name)}, use_cache=True)

    model, other = tiny(), tiny()
    for each in (model, other):
        each.forward = types.MethodType(forward, each)
    assert written(model, custom_generate=drafting(model)) == written(other)


def test_a_weight_on_no_device_is_named() -> None:
    model = tiny()
    plugin = drafting(model)
    written(model, custom_generate=plugin)
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(WeightsNotLoadedError, match=r"layers.1.mlp.gate_proj.weight of Llama"):
        written(model, custom_generate=plugin)


def test_prefixes_of_earlier_calls_are_used_where_that_is_asked_for() -> None:
    """A hook remembers what no module shows: only then it could matter."""
    strength = {"now": 1.0}
    for reuses in (False, True):
        model = tiny()
        model.model.layers[0].mlp.register_forward_hook(lambda *given: given[-1] * strength["now"])
        plugin = Foredraft(model, NoDrafter(), budget=FixedBudget(0), reuse_prefixes=reuses)
        strength["now"] = 1.0
        written(model, custom_generate=plugin)
        strength["now"] = -1.0
        assert (written(model, custom_generate=plugin) == written(model)) != reuses
        CHANGES["copy into one"](model)  # what shows is seen
        assert written(model, custom_generate=plugin) == written(model)
