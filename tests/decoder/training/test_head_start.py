from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from decoder.errors import TeachingTextError, UnsupportedModelError
from decoder.model.pretrained import LanguageModel
from decoder.training import head_start
from decoder.training.head_start import (
    _constant,
    _fitted,
    _low_rank,
    head_config,
    recorded_states,
    started_head,
    trained_states,
)
from decoder.training.head_trainer import TeachingModel
from decoder.training.judging import agreement
from decoder.training.taught_store import TaughtStore
from decoder.training.teacher import Teacher
from tests.decoder.decoding import VOCABULARY, tiny_gemma, tiny_llama
from tests.decoder.rounding import Rounding
from tests.decoder.training.teaching import (
    counting_llama,
    drawn_head,
    drawn_texts,
    language_model_of,
    prompts_of,
    states_of,
)

TINY = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=256)
SMOLLM2 = LlamaConfig(
    hidden_size=576,
    num_attention_heads=9,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
)


def own_weights(config: LlamaConfig, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [length], how much of each position's attention stays with itself."""
    positions = torch.arange(length)[None]
    head_size = config.hidden_size // config.num_attention_heads
    vector = _constant(head_size).expand(1, 1, length, -1)
    rotation: Any = LlamaRotaryEmbedding(config)(vector, positions)
    query, key = (each.to(dtype) for each in apply_rotary_pos_emb(vector, vector, *rotation))
    scores = (query.float() @ key.float().transpose(-1, -2))[0, 0] / head_size**0.5
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    own: torch.Tensor = scores.masked_fill(~causal, -torch.inf).softmax(-1).diagonal()
    return own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "length"),
    [(TINY, 8), (TINY, 256), (SMOLLM2, 8), (SMOLLM2, 64), (SMOLLM2, 512), (SMOLLM2, 2048)],
)
def test_heads_of_one_position_look_nowhere_else(
    config: LlamaConfig, length: int, dtype: torch.dtype
) -> None:
    least = 0.99 if dtype == torch.float32 else 0.98
    assert float(own_weights(config, length, dtype).min()) > least


def test_fewer_frequencies_would_look_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_start, "_SELF_FREQUENCIES", 3)
    monkeypatch.setattr(head_start, "_SELF_SCORE", 30.0)
    assert float(own_weights(SMOLLM2, 512, torch.float32).min()) < 0.6


def test_the_ridge_is_numpys() -> None:
    rng = np.random.default_rng(0)
    # Whole numbers: their sums of products round nowhere, whatever the order.
    inputs = rng.integers(-9, 10, (200, 12)) @ rng.integers(-3, 4, (12, 12))
    outputs = rng.integers(-9, 10, (200, 5))
    gram = inputs.T @ inputs
    ridge = 1e-2 * np.trace(gram) / 12
    stacked = np.vstack([inputs, ridge**0.5 * np.eye(12)])
    expected = np.linalg.lstsq(stacked, np.vstack([outputs, np.zeros((12, 5))]), rcond=None)[0]
    found = _fitted(torch.from_numpy(inputs).float(), torch.from_numpy(outputs).float())
    Rounding(torch.float32, width=1, operations=1).check(found, expected.T)


def test_no_product_of_a_rank_does_more_of_a_matrix_on_its_inputs() -> None:
    """The best one projects what the matrix gives onto its first principal directions."""
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((400, 10)) * np.geomspace(0.01, 10, 10)
    matrix = rng.standard_normal((6, 10))
    down, up = _low_rank(torch.from_numpy(matrix).float(), torch.from_numpy(inputs).float(), 3)
    assert (down.shape, up.shape) == ((3, 10), (6, 3))
    given = inputs @ matrix.T
    _, _, directions = np.linalg.svd(given, full_matrices=False)
    best = given @ directions[:3].T @ directions[:3]
    found = inputs @ (up @ down).numpy().T
    assert np.linalg.norm(given - best) > 0.01 * np.linalg.norm(given)
    assert np.allclose(found, best, atol=1e-3 * np.abs(given).max())


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
    generator = torch.Generator().manual_seed(seed)
    store.add(teacher.answer(prompts_of([6] * num_prompts, seed), 24, 1.0, generator))
    return store


def test_a_started_head_foretells_more_than_a_drawn_one(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    language_model = language_model_of(counting_llama(), byte_tokenizer)
    store = recorded_of(language_model, tmp_path / "taught", 150, 1)
    judged = recorded_of(language_model, tmp_path / "judging", 20, 2)
    tokens = torch.arange(VOCABULARY)
    teaching = TeachingModel(language_model, tokens)
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
        started_head(language_model_of(tiny_llama(), byte_tokenizer), store, torch.arange(20))


def test_a_target_of_other_layers_is_refused(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UnsupportedModelError, match=r"another kind than Llama's.*--speculator"):
        head_config(language_model_of(tiny_gemma(), byte_tokenizer), 20)


def test_inputs_of_few_directions_are_fitted_as_well() -> None:
    """As those of a text of one repeated token: rank one, and the rounding errors of float32."""
    rng = np.random.default_rng(2)
    direction = rng.standard_normal(64)
    inputs = torch.from_numpy(np.outer(1e3 * rng.standard_normal(500), direction)).float()
    matrix = torch.from_numpy(rng.standard_normal((16, 64))).float()
    down, up = _low_rank(matrix, inputs, 8)
    given = inputs @ matrix.T
    assert float((inputs @ (up @ down).T - given).norm()) < 1e-2 * float(given.norm())
    assert bool(torch.isfinite(_fitted(torch.zeros(50, 6), torch.ones(50, 3))).all())
