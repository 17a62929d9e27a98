"""Adapters of PEFT: outputs with drafts are those of `generate` with the adapter that is active."""

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)

from tests.decoder.decoding import ScriptedDrafter, at_random, prompt_of
from tests.decoder.engines.transformers.batched import foredraft
from tests.decoder.engines.transformers.live.model_changes import tiny

NEW_TOKENS: Final = 10
PROMPTS: Final = torch.tensor([prompt_of(12, seed=row, vocabulary=250) for row in range(2)])

pytestmark = [  # of PEFT, about itself
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LAYERS: Final = ["q_proj", "v_proj", "up_proj"]
VIRTUAL: Final[dict[str, Any]] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
CONFIGURATIONS: Final[dict[str, Callable[[], Any]]] = {
    "LoRA": lambda: LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LAYERS),
    "DoRA": lambda: LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LAYERS, use_dora=True),
    "IA3": lambda: IA3Config(
        task_type="CAUSAL_LM", target_modules=LAYERS, feedforward_modules=["up_proj"]
    ),
    "prompt tuning": lambda: PromptTuningConfig(**VIRTUAL),
    "prefix tuning": lambda: PrefixTuningConfig(**VIRTUAL),
    "p-tuning": lambda: PromptEncoderConfig(**VIRTUAL, encoder_hidden_size=16),
}


def moved(peft: Any, seed: int = 6) -> Any:
    """Have adapters do something: as they are made, some do nothing."""
    random = torch.Generator().manual_seed(seed)
    for name, weight in peft.named_parameters():
        if any(part in name for part in ("lora_", "ia3_", "prompt_encoder")):
            weight.data.add_(torch.randn(weight.shape, generator=random) * 0.7)
    return peft


def adapted(kind: str) -> Any:
    torch.manual_seed(2)
    return moved(get_peft_model(tiny(), CONFIGURATIONS[kind]())).eval()


def written(model: Any, **options: Any) -> list[list[int]]:
    rows: list[list[int]] = model.generate(
        input_ids=PROMPTS,
        attention_mask=torch.ones_like(PROMPTS),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        **options,
    ).tolist()
    return rows


def drafting(model: Any) -> dict[str, Any]:
    return {"custom_generate": foredraft(model, ScriptedDrafter(at_random()))}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_an_adapter_of_any_kind_counts(kind: str) -> None:
    peft, base = adapted(kind), written(tiny())
    expected = written(copy.deepcopy(peft))
    if kind == "prefix tuning" and expected == base:
        pytest.skip("this PEFT gives this transformers no prefix")
    assert [row[-NEW_TOKENS:] for row in expected] != [row[-NEW_TOKENS:] for row in base]
    for given in (peft, peft.get_base_model()):
        way = drafting(given)
        for _ in range(2):
            assert written(peft, **way) == expected
        with peft.disable_adapter():
            assert written(peft, **way) == base


@pytest.mark.parametrize("kind", ["LoRA", "IA3"])
def test_merged_and_unmerged_weights_count(kind: str) -> None:
    peft = adapted(kind)
    way, expected = drafting(peft), written(peft)
    peft.merge_adapter()
    assert written(peft, **way) == written(peft)
    peft.unmerge_adapter()
    assert written(peft, **way) == expected
    merged = peft.merge_and_unload()
    assert written(merged, **way) == written(merged)


def two_adapters() -> tuple[Any, dict[str, list[list[int]]]]:
    """Return a model with two, and what it writes with each and with none."""
    peft = adapted("LoRA")
    peft.add_adapter("other", CONFIGURATIONS["LoRA"]())
    moved(peft, seed=7)
    outputs = {}
    for name in ("default", "other"):
        peft.set_adapter(name)
        outputs[name] = written(peft)
    with peft.disable_adapter():
        outputs["__base__"] = written(peft)
    assert len(set(map(str, outputs.values()))) == 3
    return peft, outputs


def test_adapters_are_switched_added_and_deleted_between_calls() -> None:
    peft, outputs = two_adapters()
    way = drafting(peft)
    for name in ("default", "other", "default", "default", "other"):
        peft.set_adapter(name)
        assert written(peft, **way) == outputs[name]
    peft.add_adapter("third", CONFIGURATIONS["LoRA"]())
    peft.set_adapter("third")
    assert written(peft, **way) == written(peft)
    peft.delete_adapter("third")
    peft.set_adapter("other")
    assert written(peft, **way) == outputs["other"]
    peft.delete_adapter("default")
    assert written(peft, **way) == outputs["other"]


def test_adapters_of_transformers_own_integration_count() -> None:
    model = tiny()
    try:
        copy.deepcopy(model).add_adapter(CONFIGURATIONS["LoRA"]())
    except ValueError as error:
        pytest.skip(f"transformers takes no such PEFT: {error}")
    way, base = drafting(model), written(model)
    for name in ("a", "b"):
        model.add_adapter(CONFIGURATIONS["LoRA"](), adapter_name=name)
        moved(model, seed=ord(name))
        assert written(model, **way) == written(model) != base
    model.set_adapter("a")
    assert written(model, **way) == written(model)
    model.disable_adapters()
    assert written(model, **way) == base
    model.enable_adapters()
    model.delete_adapter("b")
    assert written(model, **way) == written(model) != base


def test_rows_of_a_batch_with_adapters_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    peft, outputs = two_adapters()
    way = drafting(peft)
    for names in (["default", "other"], ["other", "__base__"], ["other", "other"]):
        expected = [outputs[name][row] for row, name in enumerate(names)]
        assert written(peft, adapter_names=names) == expected
        assert written(peft, adapter_names=names, **way) == expected
    assert "without drafts: adapter_names gives each row" in caplog.text
    peft.set_adapter("other")
    assert written(peft, **way) == outputs["other"]
