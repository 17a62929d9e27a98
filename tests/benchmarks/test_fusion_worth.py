import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.decoding import fit_fusion
from benchmarks.decoding import fusion_worth as fusion
from benchmarks.decoding.fit_fusion import PlaceSeen, fit
from benchmarks.decoding.fusion_worth import FUSED, OVERALL, RECYCLED, RETRIEVED, WAYS, worth
from decoder.drafters.fusion import SourceWeights
from decoder.drafters.kernels.siblings import BIAS, NUM_SETS, NUM_WEIGHTS, SLOPE
from decoder.model.pretrained import Precision

PROMPTS = ["a b a b", "b a b a", "c a c", "d d a"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    return path


@pytest.mark.programs
def test_all_ways_are_measured_at_equal_nodes(
    tiny_model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.json"
    fusion.main(prompts, output, None, str(tiny_model), 3, 1, [4], 12, Precision.FLOAT32)
    report = json.loads(output.read_text(encoding="utf-8"))
    found = report["tokens_per_pass"]["4"]
    assert set(found) == set(WAYS)
    assert all(figures[OVERALL] >= 1 for figures in found.values())
    assert (report["num_prompts"], report["num_warm"]) == (3, 1)
    better = max(found[RETRIEVED][OVERALL], found[RECYCLED][OVERALL])
    assert worth(found, OVERALL) == found[FUSED][OVERALL] / better
    assert "4 nodes" in capsys.readouterr().out


def test_weights_are_fitted_in_the_shape_that_drafts_begin_with(
    tiny_model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "prior.npy"
    fit_fusion.main(prompts, output, None, str(tiny_model), 1, 3, 12, Precision.FLOAT32)
    assert np.load(output).shape == SourceWeights(1).values.shape
    assert "nats a place" in capsys.readouterr().out


def test_fit_finds_the_weights_that_outcomes_were_drawn_with() -> None:
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(6000):
        features = np.zeros((1, 3, NUM_WEIGHTS))
        odds = rng.normal()
        features[0, 0, [BIAS, SLOPE]] = 1.0, odds
        came = rng.random() < 1 / (1 + np.exp(-(0.8 * odds - 0.5)))
        seen.append(PlaceSeen(5, features, np.array([came])))
    weights, nats = fit(seen)
    assert weights[5, 0, SLOPE] == pytest.approx(0.8, abs=0.1)
    assert weights[5, 0, BIAS] == pytest.approx(-0.5, abs=0.1)
    assert not weights[np.arange(NUM_SETS) != 5].any()
    assert 0.5 < nats < 0.7
