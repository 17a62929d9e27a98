import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.decoding import kept_worth
from benchmarks.decoding.kept_worth import COLD, summary
from decoder.model.pretrained import Precision


@pytest.mark.programs
def test_what_is_kept_is_measured_over_a_cold_start(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    prompts, output = tmp_path / "prompts.txt", tmp_path / "report.json"
    prompts.write_text("a b a b\nb a b a\nc a c\nd d a", encoding="utf-8")
    kept_worth.main(prompts, output, None, str(tiny_model), 2, 1, [4], 12, Precision.FLOAT32)
    report = json.loads(output.read_text(encoding="utf-8"))
    found = report["budgets"]["4"]
    assert len(found) == 5
    assert found[COLD]["over_cold"] == 1.0
    assert all(len(figures["tokens_and_passes"]) == 2 for figures in found.values())
    assert (report["num_prompts"], report["num_earlier"], report["num_others"]) == (2, 1, 1)
    assert "4 nodes" in capsys.readouterr().out


def test_ratios_are_of_tokens_per_pass() -> None:
    cold = np.array([[10, 10], [10, 5]])
    found = summary({COLD: cold, "kept": np.array([[10, 5], [10, 5]])})
    assert found["kept"]["tokens_per_pass"] == 2.0
    assert found["kept"]["over_cold"] == 1.5
    low, high = found["kept"]["interval"]
    assert (low, high) == (1.0, 2.0)
