from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from transformers import AutoModelForCausalLM

from benchmarks.decoding import small_draft_model
from benchmarks.decoding.small_draft_model import foretold, opened, small_model, teach
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


def test_a_target_of_two_layers_is_copied_whole(target: LanguageModel, recorded: Path) -> None:
    """So it foretells what the target wrote greedily, but for what bfloat16 rounds."""
    copied = small_model(target.model)
    expected = target.model.state_dict()
    assert {name: value.tolist() for name, value in copied.state_dict().items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    shares = foretold(copied, opened(recorded / "judging"))
    assert shares[0] > 0.9
    assert shares[0] <= shares[1] <= shares[2] <= 1


def test_teaching_brings_a_model_nearer_to_its_target(
    target: LanguageModel, recorded: Path
) -> None:
    small = small_model(target.model)
    torch.manual_seed(0)
    with torch.no_grad():
        for each in small.base_model.layers.parameters():
            if each.dim() == 2:
                each.normal_(0, 0.1)
    embedding = small.get_input_embeddings().weight.clone()
    store = opened(recorded / "taught")
    before = foretold(small, store)
    ticks = map(float, count())  # a second a step, however busy the machine is
    clock = partial(next, ticks)
    assert teach(small, target, store, 150.0, num_frequent=4, num_others=2, clock=clock) == 149
    after = foretold(small, store)
    assert after[0] > before[0] + 0.1
    assert torch.equal(small.get_input_embeddings().weight, embedding)


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


def test_a_folder_without_recorded_texts_is_told(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="holds no recorded texts"):
        opened(tmp_path)
