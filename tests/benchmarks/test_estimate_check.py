import json
from pathlib import Path

import pytest

from benchmarks.decoding.estimate_check import main
from decoder.model.pretrained import Precision


def test_it_compares_a_projection_with_a_measurement(tiny_model: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "check.json"
    prompts.write_text("a b c a b\nb c d\n")
    with pytest.raises(SystemExit) as ended:
        main(
            prompts=prompts,
            output=output,
            model=str(tiny_model),
            dtype=Precision.FLOAT32,
            max_new_tokens=24,
            repeat=2,
        )
    report = json.loads(output.read_text())
    measured, projected = report["measured"], report["projected"]
    assert report["num_prompts"] == 2
    assert report["error"] == pytest.approx(projected["speedup"] / measured["speedup"] - 1)
    assert bool(ended.value.code) == (abs(report["error"]) > report["allowed"])
    for figures in (measured, projected):
        assert 1 <= figures["tokens_per_step"] <= 24
        assert figures["speedup"] > 0
