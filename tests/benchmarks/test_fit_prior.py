import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fit_prior.network import Network, Schedule, fit, mean_surprise, random_weights
from benchmarks.fit_prior.outcomes import Outcome, Outcomes
from benchmarks.fit_prior.recording import Recorder, record
from benchmarks.workloads import Workload
from retriever.drafter import DraftRequest
from retriever.kernels.layout import HIDDEN, Evidence, Traits
from retriever.kernels.mixing import depth_bucket, match_bucket, score, score_escape, to_shares
from retriever.predict.weights import from_values, prior_weights
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.traces.traces import Trace
from tests.benchmarks.conftest import Runner
from tests.benchmarks.drafting import ids
from tests.retriever.predict.blank import blank_weights


def random_outcome(rng: np.random.Generator) -> Outcome:
    count = int(rng.integers(0, 6))
    traits = rng.uniform(0, 2, Traits.SIZE).astype(np.float32)
    place = (int(rng.integers(0, 6)), int(match_bucket(traits)), int(depth_bucket(traits)))
    features = rng.normal(size=(count, Evidence.SIZE)).astype(np.float32)
    return Outcome(features, traits, place, int(rng.integers(-1, count)))


def surprise_of(weights: Any, outcome: Outcome) -> float:
    """What the kernels make of one outcome."""
    evidence = np.zeros((len(outcome.features), Evidence.WIDTH), np.float32)
    evidence[:, : Evidence.SIZE] = outcome.features
    sums = np.zeros(HIDDEN, np.float32)
    shares = np.zeros(len(outcome.features), np.float32)
    score(weights[0], outcome.traits, evidence, shares, 0, len(shares), sums)
    to_shares(shares, score_escape(weights[0], outcome.traits, outcome.place[0]))
    return float(-np.log2(shares[outcome.chosen] if outcome.chosen >= 0 else 1 - shares.sum()))


def test_network_is_that_of_the_kernels() -> None:
    rng = np.random.default_rng(1)
    weights = random_weights(rng)
    weights["escape"] = rng.normal(size=weights["escape"].shape)
    outcomes = [random_outcome(rng) for _ in range(200)]
    fitted = Network(weights)(Outcomes.of(outcomes)).detach().numpy()
    expected = [surprise_of(weights, outcome) for outcome in outcomes]
    np.testing.assert_allclose(fitted, expected, atol=0.01)
    assert Network(weights).to_weights().tobytes() == weights.tobytes()


def traces(count: int = 12) -> list[Trace]:
    """Outputs that go on with the prompt, but for every fourth token."""
    rng, made = np.random.default_rng(4), []
    for _ in range(count):
        prompt = rng.integers(0, 40, 60)
        output = prompt.copy()
        output[::4] = rng.integers(0, 40, 15)
        made.append(Trace(ids(*prompt), ids(*output)))
    return made


def test_nodes_on_the_path_are_noted_with_what_came_true() -> None:
    """After 4, 5, 1 the prompt went on with 3 and 6; the output goes on with 3, 6, 9."""
    recorder = Recorder(256, blank_weights())
    drafter = EmbeddedDrafter(predictor=recorder)
    prompt = [1, 2, 4, 5, 1, 3, 6, 1, 2, 4, 5, 1]
    drafter.open("one", ids(*prompt))
    drafter.draft([DraftRequest("one", ids(), len(prompt), 16)])
    work = recorder.scratch.work
    root = work.nodes[0]
    children = work.nodes["token"][root["first_child"] : root["end_child"]].tolist()
    drafter.close("one", ids(3, 6, 9))
    outcomes = recorder.outcomes()
    assert {2, 3} <= set(children)
    assert outcomes.chosen[0] == children.index(3)
    assert outcomes.counts[0] == len(children)
    assert outcomes.places[:, 2].tolist() == [0, 1, 2]  # depths
    assert outcomes.chosen[1] >= 0
    assert outcomes.chosen[2] == -1


def test_fitting_lowers_the_surprise() -> None:
    outcomes = record(Workload("copying", traces(), [], []), blank_weights(), 8)
    nodes = np.random.default_rng(6).permutation(len(outcomes))
    taught, kept = outcomes.take(nodes[50:]), outcomes.take(nodes[:50])
    weights = fit(taught, Schedule(epochs=20, batch=64))
    assert mean_surprise(weights, kept) < 0.9 * mean_surprise(blank_weights(), kept)
    again = fit(taught, Schedule(epochs=20, batch=64))
    assert weights.tobytes() == again.tobytes()


def write(path: Path, made: list[Trace]) -> Path:
    rows = [{"prompt_ids": t.prompt.tolist(), "output_ids": t.output.tolist()} for t in made]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_command_writes_weights_that_load(tmp_path: Path, run: Runner) -> None:
    one, other = write(tmp_path / "a.jsonl", traces(4)), write(tmp_path / "b.jsonl", traces(3))
    stated = ("--workload", f"one={one},warm={other}", "--workload", f"other={other}")
    to = ("--output", tmp_path / "weights.npy")
    small = ("--budget", 8, "--rounds", 2, "--epochs", 2, "--nodes", 100)
    done = run("benchmarks.fit_prior.__main__", *stated, *small, *to)
    assert done.status == 0, done.stderr
    weights = from_values(np.load(tmp_path / "weights.npy"))
    assert weights.tobytes() != prior_weights().tobytes()
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["round 1", "round 2"]
    assert [line.split(" | ")[0] for line in lines[-2:]] == ["| one", "| other"]
    assert "-" not in lines[-1]  # there is another workload to fit to
