import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.masking_utils import causal_mask_function

from decoder.budget.cost_store import CostStore
from decoder.errors import OutOfMemoryError, UnsupportedModelError
from decoder.model import capability_check, target as target_module
from decoder.model.attention import tree_mask
from decoder.model.cache import GrowingLayer, TreeCache
from decoder.model.capability_check import FOUND_HERE, ModelVerdict
from decoder.model.compatibility import Capability
from decoder.model.passes import PlainPasses, Reading
from decoder.model.target import Target
from decoder.model.tree_rows import TreeRows
from decoder.model.user_model import UserModel
from tests.decoder.decoding import (
    SIZES,
    ScriptedDrafter,
    at_random,
    decoded,
    decoder_with,
    evaluated,
    plainly,
    prompt_of,
    tiny_convolution,
    tiny_gemma,
    tiny_llama,
    tiny_mamba,
)
from tests.oracles.exactness.tiny_models import tiny_model
from tests.suite_parts import cases

SHAPES_LOG = "decoder.model.compatibility"


def tiny_neo(window: int = 8, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=48,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        intermediate_size=64,
        attention_types=[[["global", "local"], 1]],
        window_size=window,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=None,
    )
    return evaluated(GPTNeoForCausalLM(config), dtype)


def tiny_bamba() -> PreTrainedModel:
    torch.manual_seed(0)
    config = BambaConfig(
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=8,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=None,
    )
    return evaluated(BambaForCausalLM(config))


def tiny_gpt2(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=48,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=None,
    )
    return evaluated(GPT2LMHeadModel(config), dtype)


@pytest.mark.parametrize("window", [8, 100])
def test_attention_that_counts_windows_by_slots_gets_chains(
    window: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = tiny_neo(window), prompt_of(window + 10)
    decoder = decoder_with(model, ScriptedDrafter(at_random()), verdicts=FOUND_HERE)
    assert decoder.target.capability is Capability.CHAINS
    assert decoded(decoder, prompt, 30) == plainly(model, prompt, 30)
    Target(model)
    told = [record.getMessage() for record in caplog.records if record.name == SHAPES_LOG]
    assert len(told) == 1
    assert "GPTNeoForCausalLM verifies one chain" in told[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [8, 100, 256])
def test_windows_by_slots_are_found_in_half_precision(window: int, dtype: torch.dtype) -> None:
    assert Target(tiny_neo(window, dtype)).capability is Capability.CHAINS


@pytest.mark.parametrize("length", [1, 3, 20])
def test_plain_passes_tell_positions_to_models_that_count_from_zero(length: int) -> None:
    model, prompt = tiny_bamba(), prompt_of(length)
    decoder = decoder_with(model, ScriptedDrafter(at_random()), verdicts=FOUND_HERE)
    assert decoder.target.capability is Capability.PLAIN
    assert decoded(decoder, prompt, 20) == plainly(model, prompt, 20)


def tiny_mixtral(dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = MixtralConfig(
        **SIZES,
        vocab_size=48,
        num_hidden_layers=3,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=8,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    return evaluated(MixtralForCausalLM(config), dtype)


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(cases(4, of=8)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_rounding_chooses_are_no_error(dtype: torch.dtype, seed: int) -> None:
    assert Target(tiny_mixtral(dtype, seed)).capability is Capability.TREES


ACROSS: dict[str, tuple[Callable[..., PreTrainedModel], Capability]] = {
    "llama": (partial(tiny_llama, layers=3), Capability.TREES),
    "gemma3": (partial(tiny_gemma, layers=3), Capability.TREES),
    "gpt2": (tiny_gpt2, Capability.TREES),
    "mixtral": (tiny_mixtral, Capability.TREES),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ACROSS)
def test_models_that_verify_trees_keep_them_in_all_precisions(
    name: str, dtype: torch.dtype
) -> None:
    make, capability = ACROSS[name]
    assert Target(make(dtype=dtype)).capability is capability


@pytest.mark.parametrize(
    ("make", "capability"),
    [(tiny_mamba, Capability.PLAIN), (tiny_convolution, Capability.CHAINS)],
)
def test_states_that_cannot_hold_trees_keep_what_they_promise(
    make: Callable[[], PreTrainedModel], capability: Capability
) -> None:
    assert Target(make()).capability is capability


OF = TreeRows.of


def siblings_visible(parents: Sequence[int], past: int) -> TreeRows:
    rows = OF(parents, past)
    return replace(rows, visible=np.tri(len(parents), dtype=np.bool_))


def by_slot(parents: Sequence[int], past: int) -> TreeRows:
    return replace(OF(parents, past), depths=np.arange(len(parents)))


def without_window(rows: TreeRows, _: int | None = None, **options: Any) -> torch.Tensor | None:
    return tree_mask(rows, **{**options, "mask_function": causal_mask_function})


def path_in_place(self: TreeCache, start: int, slots: torch.Tensor) -> None:
    self.truncate(start + len(slots))


def nothing_dropped(_: GrowingLayer, __: int) -> None:
    pass


Plant = tuple[object, str, object]
PLANTED: dict[str, Plant] = {
    "siblings are seen": (TreeRows, "of", siblings_visible),
    "positions by slot": (TreeRows, "of", by_slot),
    "a path stays where it lay": (TreeCache, "keep", path_in_place),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_of_trees_leave_chains(
    error: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*PLANTED[error])
    assert Target(ACROSS[name][0](dtype=dtype)).capability is Capability.CHAINS


@pytest.mark.parametrize("make", [tiny_gemma, tiny_mixtral])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_a_tree_does_not_keep_is_found(
    make: Callable[..., PreTrainedModel], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoder.model.user_model.tree_mask", without_window)
    assert Target(make(dtype=dtype)).capability is Capability.CHAINS


@pytest.mark.parametrize("name", ACROSS)
def test_rejected_tokens_that_stay_leave_no_drafts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrowingLayer, "truncate", nothing_dropped)
    monkeypatch.setattr(TreeCache, "keep", lambda *_: None)
    assert Target(ACROSS[name][0]()).capability is Capability.PLAIN


def test_positions_off_by_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = UserModel.run

    def shifted(self: UserModel, *given: Any, position_ids: torch.Tensor, **inputs: Any) -> Any:
        return run(self, *given, position_ids=position_ids + (position_ids > 10), **inputs)

    monkeypatch.setattr(UserModel, "run", shifted)
    assert Target(tiny_gemma()).capability is Capability.PLAIN


def test_a_model_that_cannot_be_decoded_plainly_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = PlainPasses.read

    def repeated(self: PlainPasses, reading: Reading, past: int) -> Any:
        return read(self, replace(reading, tokens=np.full_like(reading.tokens, 5)), past)

    monkeypatch.setattr(PlainPasses, "read", repeated)
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM .* differs from generate"):
        Target(tiny_mamba())


def test_generate_reads_the_tokens_of_a_script_as_one_pass_does() -> None:
    model = tiny_llama()
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, 40, (2, 9)))
    with torch.no_grad():
        found, expected = (
            read(model, tokens, 4) for read in (capability_check._generated, capability_check._read)
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_target_without_a_check_believes_the_configuration() -> None:
    assert Target(tiny_neo(), verdicts=None).capability is Capability.TREES


def test_a_check_leaves_no_sequence_and_a_training_model_in_its_mode() -> None:
    model = tiny_llama().train()
    target = Target(model, states=(1,))
    assert model.training
    assert target.states == {}
    assert target._committed == [0]


def test_a_second_start_does_not_check_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CostStore(tmp_path)
    assert Target(tiny_neo(), verdicts=store).capability is Capability.CHAINS
    kept = json.loads(next(tmp_path.glob("check-*.json")).read_text())
    assert kept["capability"] == "CHAINS"
    assert "window" in kept["reason"] or "tree" in kept["reason"]
    monkeypatch.setattr(target_module, "find_verdict", None)
    assert Target(tiny_neo(), verdicts=store).capability is Capability.CHAINS


@pytest.mark.parametrize("is_patched_first", [False, True])
def test_a_patched_model_and_another_of_its_configuration_have_verdicts_of_their_own(
    tmp_path: Path, *, is_patched_first: bool
) -> None:
    store = CostStore(tmp_path)
    patched, stock = tiny_llama(), tiny_llama()
    kind = type(patched).forward

    def by_slots(input_ids: Any, **options: Any) -> Any:
        options.pop("position_ids", None)  # it counts by itself
        return kind(patched, input_ids, **options)

    patched.forward = by_slots
    models = [patched, stock] if is_patched_first else [stock, patched]
    found = {id(model): Target(model, verdicts=store) for model in models}
    assert found[id(patched)].capability is Capability.CHAINS
    assert found[id(patched)].reason
    assert found[id(stock)].capability is Capability.TREES
    assert Target(stock, verdicts=CostStore(tmp_path)).capability is Capability.TREES


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_outputs_that_a_configuration_asks_for_cost_no_trees(architecture: str) -> None:
    model = tiny_model(architecture)
    model.config.output_router_logits = True
    model.config.output_hidden_states = True
    decoder = decoder_with(model, ScriptedDrafter(at_random()), verdicts=FOUND_HERE)
    assert decoder.target.capability is Capability.TREES
    prompt = prompt_of(12)
    assert decoded(decoder, prompt, 20) == plainly(model, prompt, 20)


def test_another_precision_or_configuration_is_checked_on_its_own(tmp_path: Path) -> None:
    store = CostStore(tmp_path)
    for model in (tiny_llama(), tiny_llama(dtype=torch.bfloat16), tiny_llama("eager")):
        Target(model, verdicts=store)
    assert len(list(tmp_path.glob("check-*.json"))) == 3


def test_a_kept_refusal_refuses_again(tmp_path: Path) -> None:
    store = CostStore(tmp_path)
    store.keep_verdict(tiny_llama(), ModelVerdict(None, "it differs"))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot be decoded here"):
        Target(tiny_llama(), verdicts=store)


def test_where_memory_runs_out_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> ModelVerdict:
        raise OutOfMemoryError("out of memory at 4 tokens of context")

    monkeypatch.setattr(target_module, "find_verdict", full)
    assert Target(tiny_llama(), verdicts=CostStore(tmp_path)).capability is Capability.TREES
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "capability", "num_kept"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), Capability.TREES, 0),
        (ValueError("one sequence at a time"), Capability.PLAIN, 1),
    ],
)
def test_a_model_that_reads_no_whole_sequences_is_decoded_plainly(
    error: Exception,
    capability: Capability,
    num_kept: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(capability_check, "_read", failing)
    target = Target(tiny_llama(), verdicts=CostStore(tmp_path))
    assert target.capability is capability
    assert len(list(tmp_path.iterdir())) == num_kept
    assert ("one sequence at a time" in target.reason) == bool(num_kept)
