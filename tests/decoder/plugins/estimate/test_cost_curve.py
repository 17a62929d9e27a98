"""What passes cost: by data sheets, from files, measured."""

import json
from pathlib import Path

import numpy as np
import pytest

from decoder.budget.costs import CostSurface
from decoder.errors import CostFileError, UnsupportedModelError
from decoder.model.pretrained import LanguageModel
from decoder.plugins.estimate.cost_curve import (
    ARITHMETIC_SHARE,
    BANDWIDTH_SHARE,
    CostCurve,
    from_file,
    measured,
    roofline,
)
from decoder.plugins.estimate.options import DEFAULT_ROOFLINE, DEVICES, ROOFLINES, SIZES
from indexer.reader import Vocabulary
from tests.decoder.decoding import tiny_llama, tiny_mamba


def model_of(model: object) -> LanguageModel:
    return LanguageModel("tiny", model, None, Vocabulary(48, "ab" * 32), ())  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("name", ROOFLINES)
def test_a_roofline_is_the_longer_of_reading_and_arithmetic(name: str, batch: int) -> None:
    size_name, device_name = name.split("-")
    size, device = SIZES[size_name], DEVICES[device_name]
    curve = roofline(name, batch, 63)
    for nodes, context in ((0, 0), (7, 100), (63, 5000)):
        bandwidth = device.bytes_per_s * BANDWIDTH_SHARE * size.num_devices
        reading = size.num_parameters * 2 / bandwidth
        work = 2 * size.num_parameters * batch * (1 + nodes)
        arithmetic = work / (device.flops * ARITHMETIC_SHARE * size.num_devices)
        cache = size.kv_bytes * context * batch / bandwidth
        expected = max(reading, arithmetic) + cache
        assert curve.seconds(nodes, context) == pytest.approx(expected, rel=1e-9)
    assert DEFAULT_ROOFLINE in ROOFLINES


def test_nodes_cost_nothing_alone_and_much_in_a_large_batch() -> None:
    alone, many = roofline(DEFAULT_ROOFLINE, 1, 64), roofline(DEFAULT_ROOFLINE, 256, 64)
    assert alone.seconds(64, 0) == alone.seconds(0, 0)
    assert many.seconds(64, 0) > 30 * many.seconds(0, 0)
    assert many.batch == 256


def test_every_roofline_states_its_assumptions() -> None:
    for name in ROOFLINES:
        curve = roofline(name, 2, 8)
        assert "2 sequences in a pass" in curve.source
        told = " ".join(curve.assumptions)
        assert "bfloat16" in told
        assert "data sheet" in told


def test_a_curve_goes_on_beyond_its_widest_pass_and_says_so() -> None:
    surface = CostSurface((10, 20), (1, 4, 8), ((1.0, 4.0, 6.0), (2.0, 5.0, 9.0)))
    curve = CostCurve(surface, "by hand")
    assert curve.reaching(7) is curve
    wider = curve.reaching(15)
    assert wider.seconds(15, 10) == 6.0 + 8 * 0.5
    assert wider.seconds(15, 20) == 9.0 + 8 * 1.0
    assert np.isclose(wider.seconds(3, 15), 4.5)
    assert wider.assumptions == ("beyond 7 nodes, extrapolated from passes of 3 and 7",)


WIDTHS, SECONDS = [1, 2, 8], [0.02, 0.03, 0.05]


@pytest.mark.parametrize(
    "content",
    [
        {"widths": WIDTHS, "seconds": SECONDS},
        {"contexts": [64], "widths": WIDTHS, "seconds": [SECONDS], "format": 1, "key": {}},
        {"cost_curve": {"64": {"1": 0.02, "2": 0.03, "8": 0.05}}, "overall": {}},
    ],
)
def test_costs_are_read_in_every_form(tmp_path: Path, content: object) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content))
    curve = from_file(path)
    assert [curve.seconds(nodes, 900) for nodes in (0, 1, 7)] == SECONDS
    assert str(path) in curve.source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '{"widths": [1, 2]}',
        '{"widths": [2, 3], "seconds": [1, 2]}',
        '{"widths": [1], "seconds": [1]}',
        '{"widths": [1, 2], "seconds": [1, -2]}',
        '{"widths": [1, 2], "seconds": [1]}',
        '{"cost_curve": {}}',
        '{"cost_curve": []}',
    ],
)
def test_a_file_without_costs_is_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostFileError, match=r"costs\.json"):
        from_file(path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CostFileError, match=r"none\.json cannot be read"):
        from_file(tmp_path / "none.json")


def test_passes_are_measured_of_a_model_that_verifies_trees() -> None:
    curve = measured(model_of(tiny_llama()), None).reaching(64)
    assert 0 < curve.seconds(0, 64) <= curve.seconds(64, 64)
    assert "measured on this machine" in curve.source
    with pytest.raises(UnsupportedModelError, match="--costs"):
        measured(model_of(tiny_mamba()), None)
