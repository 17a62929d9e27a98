from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.decoding import fit_fusion
from benchmarks.decoding.fit_fusion import Places, PlaceSeen, fit, report
from decoder.drafters import source_weights
from decoder.drafters.kernels.readings import DRAFT_MODEL
from decoder.drafters.kernels.siblings import BIAS, NUM_UNREAD_SETS, NUM_WEIGHTS, SLOPE
from decoder.drafters.source_weights import PRIOR_ROWS, load_prior
from decoder.model.pretrained import Precision

PROMPTS = ["a b a b", "b a b a", "c a c", "d d a"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    return path


@pytest.mark.parametrize("draft", [False, True])
def test_weights_are_fitted_in_the_form_that_drafts_begin_with(  # noqa: PLR0913, PLR0917  fixtures
    tiny_model: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    draft: bool,  # noqa: FBT001  a parameter
) -> None:
    output, shipped = tmp_path / "fusion_prior.npz", load_prior()
    draft_model = str(tiny_model) if draft else None
    options = (None, str(tiny_model), 1, 3, 12, Precision.FLOAT32, None, draft_model)
    fit_fusion.main(prompts, output, *options)
    assert "nats a place as shipped" in capsys.readouterr().out
    monkeypatch.setattr(source_weights, "files", lambda _: tmp_path)
    fitted = load_prior()
    assert fitted.shape == shipped.shape
    changed = {int(place) // NUM_UNREAD_SETS for place in np.nonzero(fitted != shipped)[0]}
    assert changed == ({DRAFT_MODEL} if draft else {0})


def test_fit_finds_the_weights_that_outcomes_were_drawn_with() -> None:
    rng = np.random.default_rng(0)
    chosen = NUM_UNREAD_SETS + 5
    seen = []
    for number in range(6000):
        features = np.zeros((1, len(PRIOR_ROWS), NUM_WEIGHTS))
        odds = rng.normal()
        features[0, 0, [BIAS, SLOPE]] = 1.0, odds
        came = rng.random() < 1 / (1 + np.exp(-(0.8 * odds - 0.5)))
        seen.append(PlaceSeen(chosen, features, np.array([came]), is_fitted=number % 3 != 2))
    weights = fit(seen)
    assert weights[chosen, 0, SLOPE] == pytest.approx(0.8, abs=0.1)
    assert weights[chosen, 0, BIAS] == pytest.approx(-0.5, abs=0.1)
    assert weights[NUM_UNREAD_SETS, 0, SLOPE] == pytest.approx(0.8, abs=0.2)  # never seen
    assert not (weights != load_prior())[:NUM_UNREAD_SETS].any()
    report(seen, weights)
    held_out = Places([place for place in seen if not place.is_fitted])
    nats = [
        float(held_out.nats(torch.tensor(each, dtype=torch.float32)))
        for each in (weights, load_prior())
    ]
    assert 0.5 < nats[0] < min(0.7, nats[1])
