import json
import os
import stat
import time
from collections import Counter
from collections.abc import Sequence
from logging import lastResort
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder.budget.cost_store import CostStore, key_of, known_costs, store_at
from decoder.budget.costs import AdaptiveCosts, CostSurface, ObservedCosts
from decoder.budget.pass_timing import measure_costs, still_holds
from decoder.model.target import Target
from decoder.model.user_model import cache_argument
from indexer.tokenizer import CACHE_VARIABLE
from retriever.tree import DraftTree
from tests.decoder.decoding import ScriptedDrafter, decoded, decoder_with, nothing, tiny_llama

SURFACE = CostSurface((64, 512), (1, 2, 4), ((1.0, 1.5, 2.0), (2.0, 2.5, 4.0)))


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (0, [1.0, 1.5, 1.75, 2.0]),
        (64, [1.0, 1.5, 1.75, 2.0]),
        (288, [1.5, 2.0, 2.5, 3.0]),
        (960, [3.0, 3.5, 4.75, 6.0]),
    ],
)
def test_costs_lie_on_lines_between_what_was_measured(context: int, expected: list[float]) -> None:
    np.testing.assert_allclose(SURFACE.table(context), expected)


def test_dear_narrow_passes_bound_wider_and_longer_ones() -> None:
    surface = CostSurface((64, 512), (1, 2, 4), ((1.0, 3.0, 2.0), (0.5, 1.0, 4.0)))
    assert surface.table(64).tolist() == [1.0, 3.0, 3.0, 3.0]
    assert surface.table(512).tolist() == [1.0, 3.0, 3.5, 4.0]


def test_live_costs_follow_a_machine_and_forget_slow_passes() -> None:
    rng = np.random.default_rng(0)
    live = AdaptiveCosts(SURFACE)
    for step in range(400):
        width = int(rng.integers(1, 5))
        seconds = 1.7 * float(SURFACE.table(64)[width - 1]) * rng.uniform(0.95, 1.05)
        live.learn(width, 64, seconds * (50 if step % 20 == 0 else 1))
    np.testing.assert_allclose(live.table(64), 1.7 * SURFACE.table(64), rtol=0.12)
    np.testing.assert_allclose(live.table(512), 1.7 * SURFACE.table(512), rtol=0.12)


def test_live_costs_tell_a_dear_width_from_a_busy_machine() -> None:
    live = AdaptiveCosts(SURFACE)
    truth = np.array([1.0, 1.5, 3.0, 4.0])
    for step in range(1500):
        width = 1 + step % 4
        live.learn(width, 64, float(truth[width - 1]) * (3.0 if step % 300 > 150 else 1.0))
    table = live.table(64)
    np.testing.assert_allclose(table / table[0], truth, rtol=0.25)


def test_live_costs_take_a_surface_of_one_width() -> None:
    live = AdaptiveCosts(CostSurface.flat((1,), (2.0,)))
    for _ in range(100):
        live.learn(1, 10, 4.0)
        live.learn(9, 10, 4.0)
        live.learn(1, 10, 0.0)
    assert live.table(10) == pytest.approx([4.0], rel=0.01)


def test_measuring_leaves_no_trace(prompt: list[int]) -> None:
    model = tiny_llama()
    decoder = decoder_with(model, ScriptedDrafter(nothing))
    before = decoded(decoder, prompt, 10)
    surface = measure_costs(decoder.target, max_seconds=0.05)
    assert surface.widths[0] == 1
    assert all(seconds > 0 for row in surface.seconds for seconds in row)
    assert decoded(decoder, prompt, 10) == before


def test_a_pass_behind_a_made_up_context_sees_all_of_it() -> None:
    model = tiny_llama()
    target = Target(model)
    target.pretend(100)
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given[cache_argument(model)].get_seq_length()),
        with_kwargs=True,
    )
    target.verify(0, DraftTree.empty())
    assert seen == [100]


def test_a_busy_moment_does_not_pass_for_a_cost() -> None:
    passes: Counter[int] = Counter()

    def busy_at_first(_: Target, tree: DraftTree) -> float:
        passes[len(tree)] += 1
        busy = 10.0 if passes.total() < 12 else 1.0
        return busy * (1 + passes[len(tree)] % 3 / 10) * (len(tree) + 1)

    surface = measure_costs(Target(tiny_llama()), (1, 2, 4), (64,), timed=busy_at_first)
    assert surface.seconds == ((1.0, 2.0, 4.0),)


def test_measuring_fits_models_with_little_room() -> None:
    model = tiny_llama()
    model.config.max_position_embeddings = 4
    surface = measure_costs(Target(model), (1, 2, 4), max_seconds=0.01)
    assert surface.contexts == (2,)


def test_measuring_a_slow_model_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def slow(_: Target, tree: DraftTree) -> float:
        clock[0] += 1.0 + len(tree)
        return 1.0 + len(tree)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    surface = measure_costs(Target(tiny_llama()), (1, 2, 4, 8), (16, 32), 3.5, slow)
    assert surface == CostSurface((16,), (1, 2, 4), ((1.0, 2.0, 4.0),))
    assert clock[0] <= 10.0


@pytest.fixture
def counted() -> list[int]:
    return []


def known(counted: list[int], where: CostStore, model: Any = None) -> CostSurface:
    """Whether costs hold is left to the one test of it: passes of a tiny model vary too much."""
    model = model or tiny_llama()

    def measured(_: Target) -> CostSurface:
        counted.append(1)
        return SURFACE

    return known_costs(Target(model), model, where, measured, lambda *_: True)


def test_a_second_start_measures_nothing(
    tmp_path: Path, counted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    where = CostStore(tmp_path / "new" / "cache")
    assert known(counted, where) == known(counted, where) == SURFACE
    assert len(counted) == 1
    assert caplog.messages == ["measuring what passes cost, once on this machine: a few seconds"]
    assert lastResort is not None
    assert caplog.records[0].levelno >= lastResort.level, "seen where no logging is set up"
    assert [path.suffix for path in where.directory.iterdir()] == [".json"]


def test_costs_that_no_longer_hold_are_measured_again_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, where = tiny_llama(), CostStore(tmp_path)
    for _ in range(2):
        known_costs(Target(model), model, where, lambda _: SURFACE, lambda *_: False)
    assert caplog.messages[1].endswith(
        "again: passes are slower or faster now, as the machine is busier or quieter"
    )


def test_another_model_or_implementation_is_measured_on_its_own(
    tmp_path: Path, counted: list[int]
) -> None:
    where = CostStore(tmp_path)
    wider = tiny_llama()
    wider.config.intermediate_size += 1
    for model in (tiny_llama(), tiny_llama("eager"), wider):
        known(counted, where, model)
    assert len(counted) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"format": 1}',
        b"[" * 100_000,
        b'{"format": 99, "key": {}}',
    ],
)
def test_damaged_files_are_measured_anew_and_mended(
    content: bytes, tmp_path: Path, counted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    where = CostStore(tmp_path)
    known(counted, where)
    next(tmp_path.iterdir()).write_bytes(content)
    known(counted, where)
    known(counted, where)
    assert len(counted) == 2
    assert len([record for record in caplog.messages if "unusable" in record]) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("widths", [2, 1, 4]),
        ("widths", [2, 3, 4]),
        ("contexts", []),
        ("contexts", [64]),
        ("seconds", [[1.0, 2.0, float("nan")], [1.0, 2.0, 3.0]]),
        ("seconds", [[1.0, 2.0, -1.0], [1.0, 2.0, 3.0]]),
        ("seconds", [[1.0], [1.0]]),
        ("key", {"architecture": "another"}),
    ],
)
def test_foreign_and_impossible_tables_are_refused(
    name: str, value: Any, tmp_path: Path, counted: list[int]
) -> None:
    where = CostStore(tmp_path)
    known(counted, where)
    path = next(tmp_path.iterdir())
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert where.load(key_of(tiny_llama())) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to the superuser")
def test_a_directory_that_cannot_be_written_to_costs_a_measurement_only(
    tmp_path: Path, counted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert known(counted, CostStore(tmp_path / "cache")) == SURFACE
    assert "cannot be stored" in caplog.text


def test_a_file_in_the_directorys_place_costs_a_measurement_only(
    tmp_path: Path, counted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "file"
    place.touch()
    assert known(counted, CostStore(place)) == SURFACE
    assert "cannot be stored" in caplog.text


@pytest.mark.parametrize(
    ("plain", "wide", "holds"),
    [
        (1.0, 1.0, True),
        (1.2, 0.95, True),
        (5.0, 5.5, True),  # a busy machine slows all widths alike
        (20.0, 30.0, True),
        (0.6, 0.6, False),  # no load makes a pass quicker
        (1.0, 1.6, False),  # nor one width alone slower
        (5.0, 1.0, False),
    ],
)
def test_kept_costs_hold_on_a_busy_machine_and_not_on_another(
    plain: float,
    wide: float,
    holds: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    target = Target(tiny_llama())

    def timed(_: Target, tree: DraftTree) -> float:
        slowness = wide if len(tree) else plain
        return slowness * float(SURFACE.table(64)[len(tree)])

    assert still_holds(target, SURFACE, timed) == holds


def test_nothing_is_kept_if_so_wished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert store_at(None) == CostStore(tmp_path)
    assert store_at("none") is None
    assert store_at("elsewhere") == CostStore(Path("elsewhere"))
    monkeypatch.setenv(CACHE_VARIABLE, "none")
    assert store_at(None) is None
    monkeypatch.delenv(CACHE_VARIABLE)
    assert "foredraft" in str(store_at(None))


def passes(costs: ObservedCosts, widths: Sequence[int], token_s: float, load: float = 1.0) -> None:
    for width in widths:
        costs.learn(width, 1, load * (0.02 + token_s * width))


def test_costs_that_are_only_observed_become_those_of_the_passes_that_come() -> None:
    costs = ObservedCosts(64)
    passes(costs, [1, 9, 1, 9, 40, 9, 40, 1, 40], token_s=0.001)
    table = costs.table_to(64, 1)
    for width in (1, 5, 9, 20, 40, 64):
        assert table[width - 1] == pytest.approx(0.02 + 0.001 * width, rel=0.1)


def test_a_width_that_was_not_seen_counts_as_cheap_so_that_it_is_tried() -> None:
    costs = ObservedCosts(64)
    passes(costs, [8, 8, 8], token_s=0.01)
    table = costs.table_to(64, 1)
    assert table[0] == pytest.approx(table[7] / 8)
    assert table[63] == pytest.approx(table[7])


def test_one_slow_pass_makes_no_width_dear() -> None:
    costs = ObservedCosts(16)
    costs.learn(1, 1, 30.0)
    passes(costs, [1, 1, 8, 8, 8], token_s=0.001)
    assert costs.table_to(16, 1)[0] == pytest.approx(0.021, rel=0.05)


def test_costs_that_are_observed_follow_the_load_of_the_machine() -> None:
    costs = ObservedCosts(16)
    passes(costs, [1, 8] * 8, token_s=0.001)
    passes(costs, [1, 8] * 40, token_s=0.001, load=2.0)
    table = costs.table_to(16, 1)
    assert table[0] == pytest.approx(0.042, rel=0.15)
    assert table[7] == pytest.approx(0.056, rel=0.15)


def test_a_width_that_became_cheap_is_tried_again_after_a_while() -> None:
    costs = ObservedCosts(16)
    passes(costs, [1, 1, 1], token_s=0.001)
    for _ in range(3):
        costs.learn(8, 1, 1.0)
    assert costs.table_to(16, 1)[7] == pytest.approx(1.0)
    passes(costs, [1] * 9000, token_s=0.001)
    assert costs.table_to(16, 1)[7] < 0.03


@pytest.mark.parametrize("max_width", [1, 2, 8, 9, 100, 2304])
def test_every_width_up_to_the_widest_has_a_cost(max_width: int) -> None:
    costs = ObservedCosts(max_width)
    assert len(costs.table_to(max_width, 1)) == max_width
    costs.learn(max_width + 1, 1, 1.0)
    passes(costs, [max_width] * 3, token_s=0.001)
    assert (np.diff(costs.table_to(max_width, 1)) >= 0).all()
