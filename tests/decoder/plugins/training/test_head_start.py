from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from decoder.errors import TeachingTextError, UnsupportedModelError
from decoder.model.pretrained import LanguageModel
from decoder.plugins.speculators.eagle import Eagle3Head
from decoder.plugins.training.head_start import (
    head_config,
    recorded_states,
    started_head,
    trained_states,
)
from decoder.plugins.training.head_trainer import Teaching
from decoder.plugins.training.judging import agreement
from decoder.plugins.training.taught_store import Example, TaughtStore
from decoder.plugins.training.teacher import Teacher
from tests.decoder.decoding import VOCABULARY, evaluated, tiny_gemma, tiny_llama
from tests.decoder.plugins.training.teaching import (
    counting_llama,
    drawn_head,
    drawn_texts,
    language_model_of,
    prompts_of,
    states_of,
)
from tests.decoder.rounding import Rounding

pytestmark = pytest.mark.training


def one_headed() -> PreTrainedModel:
    """Return a model of which a head of attention has 64 numbers, as SmolLM2's and Llama's do."""
    torch.manual_seed(4)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=1,
        num_hidden_layers=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    return evaluated(LlamaForCausalLM(config))


TARGETS: dict[str, Callable[[], PreTrainedModel]] = {
    "tiny": partial(tiny_llama, layers=3),
    "one head": one_headed,
}


def whole_states(taught: Example, width: int, seed: int) -> Example:
    """Return a text with states of whole numbers, whose products are summed without rounding."""
    drawn = np.random.default_rng(seed).integers(-9, 10, (len(taught.tokens), width))
    return replace(taught, states=torch.from_numpy(drawn).bfloat16())


def started_on(language_model: LanguageModel, folder: Path, texts: Sequence[Example]) -> Eagle3Head:
    store = TaughtStore(folder, {})
    store.add(texts)
    return started_head(language_model, store, torch.arange(VOCABULARY))


def own_weights(
    vector: torch.Tensor, config: LlamaConfig, length: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return [length], how much of each position's attention stays with itself.

    Args:
        vector: the query and the key of every position, before they are turned.
        config: of the rotation.
        length: positions.
        dtype: that queries and keys are rounded to.
    """
    positions = torch.arange(length)[None]
    turned = vector.expand(1, 1, length, -1)
    rotation: Any = LlamaRotaryEmbedding(config)(turned, positions)
    query, key = (each.to(dtype) for each in apply_rotary_pos_emb(turned, turned, *rotation))
    scores = (query.float() @ key.float().transpose(-1, -2))[0, 0] / len(vector) ** 0.5
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    own: torch.Tensor = scores.masked_fill(~causal, -torch.inf).softmax(-1).diagonal()
    return own


@pytest.mark.parametrize(
    ("target", "length"),
    [("tiny", 8), ("tiny", 256), *(("one head", length) for length in (8, 64, 512, 2048))],
)
def test_heads_of_one_position_look_nowhere_else(
    target: str, length: int, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    language_model = language_model_of(TARGETS[target](), byte_tokenizer)
    config: Any = language_model.model.config
    width = 4 * config.hidden_size
    texts = [whole_states(each, width, 1) for each in drawn_texts([(4, 30)] * 2)]
    attention: Any = started_on(language_model, tmp_path, texts).layers[0].self_attn
    size = config.hidden_size // config.num_attention_heads
    for name in ("q_proj", "k_proj"):
        layer = getattr(attention, name)
        copied = len(layer.bias) // 2
        assert not layer.weight[copied:].any()  # one constant vector for all that they are given
        for vector in layer.bias[copied:].split(size):
            for dtype, least in ((torch.float32, 0.99), (torch.bfloat16, 0.98)):
                assert float(own_weights(vector.detach(), config, length, dtype).min()) > least


def test_fewer_frequencies_would_look_elsewhere() -> None:
    vector = torch.zeros(64)
    vector[:3] = (30 * 64**0.5 / 3) ** 0.5  # a score of 30 with itself, of three frequencies
    config: Any = one_headed().config
    assert float(own_weights(vector, config, 512, torch.float32).min()) < 0.6


@dataclass
class Fits:
    """What a started head was fitted to, and what it was found to be, in double precision.

    Attributes:
        features: [N, 3 d], what the head takes of the target at each place.
        last: [N, d], what the target's last layer gave there.
        inputs: [N, 2 d], what the head's attention takes.
        missing: [N, d], what the target's layer was given beyond the head's state.
        own: [d, 2 d], what the heads of one position make of inputs, with all between them.
        rank: numbers between the two layers of those heads.
    """

    features: NDArray[np.float64]
    last: NDArray[np.float64]
    inputs: NDArray[np.float64]
    missing: NDArray[np.float64]
    own: NDArray[np.float64]
    rank: int


@torch.no_grad()
def fits_of(language_model: LanguageModel, head: Eagle3Head, texts: Sequence[Example]) -> Fits:
    size = language_model.model.config.hidden_size
    embed = language_model.model.get_input_embeddings()
    # The first four places of a text are left out.
    here = torch.cat([each.states[4:-2] for each in texts]).float()
    entering = torch.cat([each.states[5:-1, 2 * size : 3 * size] for each in texts]).float()
    tokens = np.concatenate([each.tokens[5:-1] for each in texts])
    features, last = here[:, : 3 * size], here[:, 3 * size :]
    layer: Any = head.layers[0]
    hidden = head.project(features)
    inputs, _ = layer.prepared(hidden, embed(torch.from_numpy(tokens.astype(np.int64))))
    attention = layer.self_attn
    down, up = (getattr(attention, name).weight for name in ("v_proj", "o_proj"))
    down, up = down[len(down) // 2 :], up[:, up.shape[1] // 2 :]
    groups = attention.num_key_value_groups
    shared = up.unflatten(1, (-1, groups, attention.head_size)).sum(2).flatten(1)
    return Fits(
        features.double().numpy(),
        last.double().numpy(),
        inputs.double().numpy(),
        (entering - hidden).double().numpy(),
        (shared @ down).double().numpy(),
        len(down),
    )


def ridge(inputs: NDArray[np.float64], outputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [d_out, d_in], numpy's least squares with a hundredth of the mean square added."""
    width = inputs.shape[1]
    added = (1e-2 * (inputs**2).sum() / width) ** 0.5 * np.eye(width)
    stacked = np.vstack([outputs, np.zeros((width, outputs.shape[1]))])
    fitted: NDArray[np.float64] = np.linalg.lstsq(np.vstack([inputs, added]), stacked, rcond=None)[
        0
    ]
    return fitted.T


def test_states_are_fitted_by_ridge(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    language_model = language_model_of(tiny_llama(layers=3), byte_tokenizer)
    texts = [whole_states(each, 128, at) for at, each in enumerate(drawn_texts([(9, 60)] * 5))]
    head = started_on(language_model, tmp_path, texts)
    fits = fits_of(language_model, head, texts)
    rounding = Rounding(torch.float32, width=1, operations=1)
    rounding.check(head.fc.weight.detach(), ridge(fits.features, fits.last))


def test_heads_of_one_position_give_as_much_of_what_is_missing_as_their_rank_allows(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The best product projects what the fit gives onto its first principal directions."""
    language_model = language_model_of(tiny_llama(layers=3), byte_tokenizer)
    texts = [whole_states(each, 128, at) for at, each in enumerate(drawn_texts([(9, 60)] * 5))]
    fits = fits_of(language_model, started_on(language_model, tmp_path, texts), texts)
    given = fits.inputs @ ridge(fits.inputs, fits.missing).T
    _, _, directions = np.linalg.svd(given, full_matrices=False)
    assert fits.rank < len(directions)
    best = given @ directions[: fits.rank].T @ directions[: fits.rank]
    assert np.linalg.norm(given - best) > 0.01 * np.linalg.norm(given)
    assert np.allclose(fits.inputs @ fits.own.T, best, atol=1e-3 * np.abs(given).max())


@pytest.mark.parametrize("num_layers", [1, 2, 3, 30])
def test_the_states_are_the_models(num_layers: int) -> None:
    taken, recorded = trained_states(num_layers), recorded_states(num_layers)
    assert recorded == (*taken, num_layers)
    assert all(0 <= number < num_layers for number in taken)


def recorded_of(
    language_model: LanguageModel, folder: Path, num_prompts: int, seed: int
) -> TaughtStore:
    store = TaughtStore(folder, {})
    teacher = Teacher(language_model, states_of(language_model))
    store.add(teacher.answer(prompts_of([6] * num_prompts, seed), 24, 1.0, seed))
    return store


def test_a_started_head_predicts_more_than_a_drawn_one(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    language_model = language_model_of(counting_llama(), byte_tokenizer)
    store = recorded_of(language_model, tmp_path / "taught", 150, 1)
    judged = recorded_of(language_model, tmp_path / "judging", 20, 2)
    tokens = torch.arange(VOCABULARY)
    teaching = Teaching.of(language_model, tokens)
    started = started_head(language_model, store, tokens)
    found = agreement(started, teaching, judged)
    drawn = agreement(drawn_head(language_model, VOCABULARY), teaching, judged)
    assert drawn.shares[0, 0] < 0.2
    assert found.shares[0, 0] > 0.6  # the next token follows from the last one alone
    assert found.worth > drawn.worth + 0.5
    last = language_model.model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    assert started.lm_head is not None
    assert torch.equal(started.lm_head.weight, last)


def test_texts_without_places_are_refused(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    store = TaughtStore(tmp_path, {})
    store.add(drawn_texts([(1, 2), (3, 3)]))
    with pytest.raises(TeachingTextError, match="shorter than 7 tokens"):
        started_head(
            language_model_of(tiny_llama(layers=3), byte_tokenizer), store, torch.arange(20)
        )


def test_a_target_of_other_layers_is_refused(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UnsupportedModelError, match=r"other layers than Llama.*--speculator"):
        head_config(language_model_of(tiny_gemma(), byte_tokenizer), 20)


def test_inputs_of_few_directions_are_fitted_as_well(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    """As those of a text of one repeated token: rank one, and the rounding errors of float32."""
    language_model = language_model_of(tiny_llama(layers=3), byte_tokenizer)
    rng = np.random.default_rng(2)
    (drawn,) = drawn_texts([(9, 500)])
    states = np.outer(1e3 * rng.standard_normal(509), rng.standard_normal(128))
    repeated = replace(
        drawn,
        tokens=np.full(509, 7, np.int32),
        states=torch.from_numpy(states).bfloat16(),
    )
    fits = fits_of(
        language_model, started_on(language_model, tmp_path / "one", [repeated]), [repeated]
    )
    fitted = ridge(fits.inputs, fits.missing)
    given, apart = fits.inputs @ fitted.T, fits.own - fitted
    assert np.linalg.norm(fits.inputs @ apart.T) < 1e-4 * np.linalg.norm(given)
    # Nor does any other text, which lies in other directions as well, make it say much more.
    assert np.linalg.norm(apart) < 1e-2 * np.linalg.norm(fitted)
    silent = replace(repeated, states=torch.zeros(509, 128).bfloat16())
    head = started_on(language_model, tmp_path / "none", [silent])
    assert all(bool(each.isfinite().all()) for each in head.parameters())
