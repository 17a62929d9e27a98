"""Head files: what is read, what is written, and what is refused with what to do about it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.errors import DecoderError, HeadFileError, HeadMismatchError
from decoder.model.states import FINAL
from decoder.plugins.speculators.eagle import (
    Eagle1Head,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    EagleKind,
)
from decoder.plugins.speculators.head_files import HeadTarget, load_head, save_head
from decoder.plugins.speculators.speculator import load_speculator
from indexer.tokenizer import Vocabulary
from retriever.errors import VocabularyMismatchError
from tests.decoder.decoding import SIZES, VOCABULARY, prompt_of, tiny_convolution, tiny_llama
from tests.decoder.plugins.speculators.drafted_sequences import Reading
from tests.decoder.plugins.speculators.published_heads import (
    DRAFTED,
    Published,
    mlp_speculator,
    official_eagle,
    official_eagle3,
    speculators_eagle3,
)

OWN = Vocabulary(VOCABULARY, "ab" * 32, "own")


@pytest.fixture
def target() -> HeadTarget:
    return HeadTarget.of(tiny_llama(layers=3), "tiny/llama", OWN)


def layer_config(**options: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES, vocab_size=VOCABULARY, num_hidden_layers=1, head_dim=8, **options)


def eagle3_head(**options: Any) -> Eagle3Head:
    torch.manual_seed(0)
    shape = EagleConfig(
        kind=EagleKind.EAGLE3,
        layer=layer_config(rope_theta=5e5, max_position_embeddings=99),
        states=(0, 1, 3),
        target_size=32,
        draft_vocabulary=len(DRAFTED),
        **options,
    )
    head = Eagle3Head(shape)
    head.keep(torch.tensor(DRAFTED))
    return head


def eagle_head() -> Eagle1Head:
    torch.manual_seed(0)
    return Eagle1Head(EagleConfig.eagle(layer_config()))


def test_states_are_counted_as_each_publisher_counts_them(
    target: HeadTarget, tmp_path: Path
) -> None:
    deep = replace(target, num_layers=30)

    def states(made: Published, **config: Any) -> tuple[int, ...]:
        changed = Published(made.config | config, made.weights)
        head = load_head(changed.write(tmp_path), deep).head
        return tuple(head.config.states)

    assert states(official_eagle3()) == (2, 15, 27)
    key = "eagle_aux_hidden_state_layer_ids"
    assert states(speculators_eagle3(), **{key: [1, 15, 30]}) == (1, 15, 30)
    # SpecForge and ModelOpt number a state by the layer that gives it, and begin with 1.
    assert states(official_eagle3(), eagle_config={key: [1, 14, 26]}) == (2, 15, 27)
    assert states(official_eagle3(), eagle_config={key: [2, 15, 27]}) == (2, 15, 27)
    assert states(official_eagle3(), **{key: [24, 29, 30]}) == (24, 29, 30)
    assert states(official_eagle()) == (FINAL,)


def test_a_head_may_be_one_file_or_several(target: HeadTarget, tmp_path: Path) -> None:
    made = official_eagle3()
    folder = made.write(tmp_path / "one")
    whole = load_head(folder / "model.safetensors", target).head.state_dict()
    names = sorted(made.weights)
    sharded = tmp_path / "several"
    sharded.mkdir()
    (sharded / "config.json").write_text(json.dumps(made.config))
    index: dict[str, str] = {}
    for number, part in enumerate((names[:5], names[5:])):
        file = f"model-{number}.safetensors"
        save_file({name: made.weights[name] for name in part}, sharded / file)
        index |= dict.fromkeys(part, file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    again = load_head(sharded, target).head.state_dict()
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(HeadFileError, match=r"lacks model-1\.safetensors"):
        load_head(sharded, target)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (eagle3_head, {}),
        (eagle3_head, {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}),
        (eagle3_head, {"fc_norm": True, "has_embedding": True}),
        (eagle_head, {}),
    ],
)
def test_what_is_written_is_read_again(
    make: Callable[..., EagleHead], options: Any, target: HeadTarget, tmp_path: Path
) -> None:
    head = make(**options).to(torch.bfloat16)
    for _ in range(2):  # the second replaces the first
        save_head(tmp_path / "head", head, target.origin(("chats",)))
    loaded = load_head(tmp_path / "head", target)
    assert loaded.origin == target.origin(("chats",))
    expected = head.state_dict()
    found = loaded.head.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert isinstance(loaded.head, EagleHead)
    config, own = loaded.head.config, head.config
    assert replace(config, layer=own.layer) == own
    for name in ("hidden_size", "rope_parameters", "max_position_embeddings", "num_hidden_layers"):
        assert getattr(config.layer, name) == getattr(own.layer, name)
    assert not [path for path in tmp_path.iterdir() if path.name != "head"]


def test_eagle3_is_written_as_speculators_saves_it(target: HeadTarget, tmp_path: Path) -> None:
    save_head(tmp_path / "head", eagle3_head(), target.origin(), num_drafted=4)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    published = speculators_eagle3()
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"].keys() == published.config["speculators_config"].keys()
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"] == {
        "architectures": ["LlamaForCausalLM"],
        "name_or_path": "tiny/llama",
    }
    assert config["transformer_layer_config"]["rope_theta"] == 5e5
    written = load_file(tmp_path / "head" / "model.safetensors")
    expected = published.weights.keys() - {"embed_tokens.weight"}
    assert written.keys() == expected
    assert written["t2d"].dtype == torch.bool
    assert written["d2t"].dtype == torch.int64


def test_a_disk_that_is_full_leaves_the_head_before(
    target: HeadTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_head(tmp_path / "head", eagle3_head(), target.origin())
    before = (tmp_path / "head" / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("decoder.plugins.speculators.head_files.save_file", full)
    with pytest.raises(HeadFileError, match=r"cannot be written to .*No space left"):
        save_head(tmp_path / "head", eagle3_head(norm_output=True), target.origin())
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_columns_out_of_order_are_put_in_order(target: HeadTarget, tmp_path: Path) -> None:
    made = official_eagle3()
    order = torch.randperm(len(DRAFTED), generator=torch.Generator().manual_seed(0))
    shuffled = made.weights | {
        "d2t": torch.tensor(DRAFTED)[order] - torch.arange(len(DRAFTED)),
        "lm_head.weight": made.weights["lm_head.weight"][order],
    }
    plain = load_head(made.write(tmp_path / "plain"), target).head.state_dict()
    mixed = Published(made.config, shuffled).write(tmp_path / "mixed")
    found = load_head(mixed, target).head.state_dict()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_a_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    made = official_eagle3()
    weights = {name: value for name, value in made.weights.items() if name not in {"d2t", "t2d"}}
    weights["lm_head.weight"] = torch.randn(VOCABULARY, 32)
    config = made.config | {"draft_vocab_size": VOCABULARY}
    folder = Published(config, weights).write(tmp_path)
    assert len(load_speculator(folder, tiny_llama(layers=3)).columns) == VOCABULARY
    cut = load_speculator(folder, tiny_llama(layers=3), vocabulary=replace(OWN, size=40))
    assert cut.columns.tolist() == list(range(40))


def spoilt(made: Published, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Published:
    return Published(made.config, made.weights | {name: change(made.weights[name].clone())})


def without(made: Published, *names: str) -> Published:
    kept = {name: value for name, value in made.weights.items() if name not in names}
    return Published(made.config, kept)


def with_value(row: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[row] = value
        return tensor

    return change


EAGLE3, EAGLE, MLP = official_eagle3(), official_eagle(), mlp_speculator()
SPECULATORS = speculators_eagle3(states=(0, 1, 2))

FOREIGN: dict[str, tuple[Published, str]] = {
    "missing": (
        without(EAGLE3, "midlayer.mlp.up_proj.weight"),
        r"lacks tensors .* layers\.0\.mlp\.up_proj\.weight",
    ),
    "missing stage": (without(MLP, "speculator.emb.2.weight"), r"lacks tensors .* emb\.2\.weight"),
    "unexpected": (
        Published(EAGLE.config, EAGLE.weights | {"gate.weight": torch.ones(3)}),
        r"no known head has \(gate\.weight\)",
    ),
    "another shape": (
        Published(EAGLE3.config | {"num_key_value_heads": 4}, EAGLE3.weights),
        r"k_proj\.weight is \[16, 64\], but config\.json requires \[32, 64\]",
    ),
    "Medusa": (
        Published(EAGLE.config, {"0.0.linear.weight": torch.ones(4, 4)}),
        "layout of the tensors is unknown .*EAGLE-3 or MLP speculator",
    ),
    "P-EAGLE": (
        Published(SPECULATORS.config | {"speculators_model_type": "peagle"}, SPECULATORS.weights),
        "type 'peagle' cannot be used here",
    ),
    "further norms": (
        Published(EAGLE.config | {"add_para_norm": True}, EAGLE.weights),
        "further norms",
    ),
    "no inner states": (
        Published(
            EAGLE3.config | {"eagle_config": {"use_aux_hidden_state": False}}, EAGLE3.weights
        ),
        "without the target's inner states",
    ),
    "states": (
        Published(
            SPECULATORS.config | {"eagle_aux_hidden_state_layer_ids": [0, 1]}, SPECULATORS.weights
        ),
        "fc takes 96 features, but 2 states of 32 are 64",
    ),
    "no sizes": (Published({}, EAGLE3.weights), "lacks hidden_size"),
    "no depths": (Published(MLP.config | {"n_predict": 0}, MLP.weights), "n_predict is 0"),
    "no numbers": (spoilt(EAGLE3, "fc.weight", with_value(7, float("nan"))), "not finite"),
    "infinite": (spoilt(EAGLE, "fc.bias", with_value(0, float("inf"))), "not finite"),
    "beyond": (spoilt(EAGLE3, "d2t", with_value(17, 31)), "d2t points outside the vocabulary"),
    "below": (spoilt(EAGLE3, "d2t", with_value(0, -1)), "d2t points outside the vocabulary"),
    "twice": (spoilt(EAGLE3, "d2t", with_value(0, 3)), "two columns for one token"),
    "maps": (spoilt(EAGLE3, "t2d", with_value(1, 1)), "d2t and t2d name different tokens"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_layouts_and_damaged_weights_are_refused(
    name: str, target: HeadTarget, tmp_path: Path
) -> None:
    made, message = FOREIGN[name]
    with pytest.raises(HeadFileError, match=message) as caught:
        load_head(made.write(tmp_path / "head"), target)
    assert str(tmp_path / "head") in str(caught.value)


OTHERS: dict[str, tuple[Published, dict[str, Any], type[Exception], str]] = {
    "hidden size": (
        EAGLE3,
        {"hidden_size": 64},
        HeadMismatchError,
        "reads states of size 32, but the model's is 64",
    ),
    "MLP": (MLP, {"hidden_size": 64}, HeadMismatchError, "reads states of size 32"),
    "vocabulary": (
        EAGLE,
        {"vocab_size": 50},
        HeadMismatchError,
        "reads a vocabulary of 48, but the model's is 50",
    ),
    "layers": (
        Published(
            SPECULATORS.config | {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]},
            SPECULATORS.weights,
        ),
        {},
        HeadMismatchError,
        "reads state 27, but the model has 3 layers",
    ),
    "too few layers": (EAGLE3, {"num_layers": 1}, HeadMismatchError, "the model has 1 layers"),
    "architecture": (
        SPECULATORS,
        {"architecture": "Gemma3ForCausalLM"},
        HeadMismatchError,
        "made for tiny/llama.*drafts for LlamaForCausalLM, not for Gemma3ForCausalLM",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_heads_of_other_models_are_refused(name: str, target: HeadTarget, tmp_path: Path) -> None:
    made, differences, error, message = OTHERS[name]
    with pytest.raises(error, match=message):
        load_head(made.write(tmp_path), replace(target, **differences))


def test_heads_trained_here_name_tokenizer_weights_and_revision(
    target: HeadTarget, tmp_path: Path
) -> None:
    target = replace(target, revision="abc")
    save_head(tmp_path / "head", eagle3_head(), target.origin())
    assert load_head(tmp_path / "head", target).origin.revision == "abc"
    other = replace(OWN, fingerprint="cd" * 32)
    with pytest.raises(VocabularyMismatchError, match=r"abababababab….*cdcdcdcdcdcd…"):
        load_head(tmp_path / "head", replace(target, vocabulary=other))
    with pytest.raises(HeadMismatchError, match="trained with other weights"):
        load_head(tmp_path / "head", replace(target, weights="00"))
    with pytest.raises(HeadMismatchError, match="for revision abc, but the model's is xyz"):
        load_head(tmp_path / "head", replace(target, revision="xyz"))
    # What a model does not say of itself is not held against a head.
    assert load_head(tmp_path / "head", replace(target, vocabulary=None, revision=None))


def test_a_model_is_known_by_its_weights_in_any_precision() -> None:
    model: Any = tiny_llama(layers=3)
    told = HeadTarget.of(model).weights
    assert HeadTarget.of(tiny_llama(dtype=torch.bfloat16, layers=3)).weights == told
    with torch.no_grad():
        model.model.norm.weight[3] += 0.5
    assert HeadTarget.of(model).weights != told


def test_files_that_cannot_be_trusted_or_read_are_refused(
    target: HeadTarget, tmp_path: Path
) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(HeadFileError, match=message):
            load_head(path, target)

    refused(tmp_path / "nowhere", "no such speculator.*hf download")
    folder = EAGLE3.write(tmp_path / "head")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 5, 200, len(whole) - 1):
        weights.write_bytes(whole[:size])
        refused(folder, "not a complete safetensors file")
    weights.unlink()
    refused(folder, "holds no model.safetensors")
    torch.save(EAGLE3.weights, folder / "pytorch_model.bin")
    refused(folder, "pickled weights can run code, so only safetensors.*save_file")
    refused(folder / "pytorch_model.bin", "pickled weights can run code")
    weights.write_bytes(whole)
    for content, message in ((b"{", "cannot be read"), (b"[]", "not a JSON object")):
        (folder / "config.json").write_bytes(content)
        refused(folder, message)
    (folder / "config.json").unlink()
    refused(folder, "config.json is missing")


def test_the_line_that_converts_pickled_weights_works(
    target: HeadTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = EAGLE3.write(tmp_path / "head")
    (folder / "model.safetensors").unlink()
    torch.save(EAGLE3.weights, folder / "pytorch_model.bin")
    with pytest.raises(HeadFileError) as caught:
        load_head(folder, target)
    line = re.search(r'python -c "(.*)"', str(caught.value))
    assert line is not None
    monkeypatch.chdir(folder)
    exec(line[1])  # noqa: S102  as users are told to run it
    assert len(load_head(folder, target).head.state_dict()) == len(EAGLE3.weights)


def test_models_whose_states_cannot_be_had_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DecoderError, match="draft without --speculator"):
        load_speculator(EAGLE3.write(tmp_path), tiny_convolution())


def test_a_head_of_the_targets_own_output_layer_refuses_targets_that_change_logits(
    tmp_path: Path,
) -> None:
    model = tiny_llama(layers=3)
    model.config.logit_scale = 0.5
    with pytest.raises(DecoderError, match="changes logits after its output layer"):
        load_speculator(EAGLE.write(tmp_path), model)


def test_a_head_without_an_embedding_shares_the_targets_weights(tmp_path: Path) -> None:
    model: Any = tiny_llama(layers=3)
    speculator = load_speculator(EAGLE3.write(tmp_path), model)
    own: Any = speculator.head
    shared = model.model.embed_tokens.weight
    assert own.embed_tokens.weight.data_ptr() == shared.data_ptr()


def test_reading_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    model: Any = tiny_llama(layers=3)
    assert isinstance(model, LlamaForCausalLM)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    head = model.lm_head
    reading = Reading(load_speculator(EAGLE.write(tmp_path), model), model, prompt_of(5))
    reading.draft()
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model.lm_head is head
    assert type(head) is torch.nn.Linear
