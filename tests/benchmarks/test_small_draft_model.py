from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.decoding import small_draft_model
from decoder.model.pretrained import LanguageModel, ModelOptions, load_model
from decoder.model.states import num_states
from decoder.training.head_start import recorded_states
from decoder.training.taught_store import TaughtStore
from decoder.training.teacher import Teacher

LENGTHS = [6, 9, 7, 12, 8, 10, 5, 11]


@pytest.fixture
def target(tiny_model: Path) -> LanguageModel:
    torch.set_num_threads(1)
    return load_model(ModelOptions(str(tiny_model)))


@pytest.fixture
def recorded(target: LanguageModel, tmp_path: Path) -> Path:
    """Return the folder of a training whose held-out texts are the taught ones."""
    teacher = Teacher(target, recorded_states(num_states(target.model)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 9, length).astype(np.int32) for length in sorted(LENGTHS)]
    for name in ("taught", "judging"):
        store = TaughtStore(tmp_path / "head.training" / name, {"model": "tiny"})
        store.add(teacher.answer(prompts, 20))
    return tmp_path / "head.training"


def test_the_model_is_written_with_its_tokenizer(
    tiny_model: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "small"
    torch.set_num_threads(1)
    small_draft_model.main(recorded, output, str(tiny_model), 0.01, 4, 0)
    assert "held-out tokens foretold: top 1" in capsys.readouterr().out
    assert load_model(ModelOptions(str(output))).vocabulary.size == 9
    written = AutoModelForCausalLM.from_pretrained(output)
    assert written.config.num_hidden_layers == 2
    assert written.dtype == torch.bfloat16
