"""The real engine on a tiny paged model; `make test-engine-onnxruntime-genai` runs this."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

og = pytest.importorskip(
    "onnxruntime_genai", reason="an extra: `make test-engine-onnxruntime-genai`"
)

from decoder.errors import UnsupportedEngineError  # noqa: E402
from decoder.plugins.onnxruntime_genai.genai_loop import DraftingLoop, Progress  # noqa: E402
from indexer.reader import Vocabulary  # noqa: E402
from retriever.drafter import Drafter  # noqa: E402
from retriever.errors import InvalidRequestError  # noqa: E402
from retriever.sessions.embedded import EmbeddedDrafter  # noqa: E402
from tests.decoder.engines.scripted import ScriptedDrafter  # noqa: E402
from tests.decoder.engines.stated_fields import check_drafts  # noqa: E402
from tests.decoder.plugins.onnxruntime_genai import paged_model  # noqa: E402

VOCABULARY = paged_model.VOCABULARY
NUM_TOKENS = 48
PROMPTS = [[7, 11, 13], [2, 3], [9, 8, 7, 6, 5, 4], [33, 40], [21, 22, 23]]


class Engine:
    """The engine on a model whose choices are known."""

    def __init__(self, folder: Path) -> None:
        self.table = paged_model.write_model(folder)
        self.model = og.Model(str(folder))

    def expected(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        return paged_model.expected(self.table, prompt, num_tokens)

    def drafter(self, wrong_at: int = 0) -> ScriptedDrafter:
        return ScriptedDrafter(self.expected, wrong_at, VOCABULARY)

    def loop(self, drafter: Drafter) -> DraftingLoop:
        return DraftingLoop(og.Engine(self.model), drafter, VOCABULARY)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("model"))


def run(loop: DraftingLoop, prompts: list[list[int]]) -> tuple[list[list[int]], list[Progress]]:
    requests = [loop.begin(prompt, NUM_TOKENS) for prompt in prompts]
    steps = []
    while loop.is_running:
        steps.extend(loop.step())
    outputs = [
        [token for each in steps if each.request is request for token in each.tokens]
        for request in requests
    ]
    return outputs, steps


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, 5, 7])
def test_output_is_that_of_no_drafts_however_wrong_the_drafts_are(
    engine: Engine, wrong_at: int
) -> None:
    loop = engine.loop(engine.drafter(wrong_at))
    outputs, steps = run(loop, PROMPTS)
    assert outputs == [engine.expected(prompt) for prompt in PROMPTS]
    plain = sum(map(len, outputs))
    assert loop.num_accepted == sum(each.num_accepted for each in steps)
    if wrong_at == 1:
        assert (loop.num_accepted, loop.num_passes >= plain) == (0, True)
    else:
        assert loop.num_accepted > 0
        assert loop.num_passes < plain
    assert loop.num_failures == 0


def test_every_pass_brings_what_was_accepted_and_one_more(engine: Engine) -> None:
    loop = engine.loop(engine.drafter())
    _, steps = run(loop, PROMPTS[:1])
    running = [each for each in steps if each.finish_reason is None]
    assert len(running) > 2
    assert all(len(each.tokens) == 1 + each.num_accepted for each in running)
    assert max(each.num_drafted for each in steps) == loop.max_draft_tokens == 7


def test_the_engine_counts_what_we_count(engine: Engine) -> None:
    counted = og.Engine(engine.model)
    loop = DraftingLoop(counted, engine.drafter(5), VOCABULARY)
    before = counted.get_speculative_stats()
    run(loop, PROMPTS)
    after = counted.get_speculative_stats()
    told = after["draft_tokens_accepted"] - before["draft_tokens_accepted"]
    assert told == loop.num_accepted > 0


def test_without_a_drafter_the_output_is_the_same(engine: Engine) -> None:
    drafter = engine.drafter()
    drafter.is_away = True
    loop = engine.loop(drafter)
    outputs, _ = run(loop, PROMPTS)
    assert outputs == [engine.expected(prompt) for prompt in PROMPTS]
    assert (loop.num_drafted, loop.num_failures > 0) == (0, True)


@pytest.mark.parametrize("failure", [None, RuntimeError("our bug")])
def test_a_drafter_that_goes_away_in_the_middle_costs_drafts_alone(
    engine: Engine, failure: Exception | None
) -> None:
    drafter = engine.drafter()
    drafter.failure = failure or drafter.failure
    loop = engine.loop(drafter)
    tokens = []
    for token in loop.generate(PROMPTS[0], NUM_TOKENS):
        tokens.append(token)
        drafter.is_away = len(tokens) > 10
    assert tokens == engine.expected(PROMPTS[0])
    assert loop.num_drafted > 0


def test_only_new_tokens_reach_the_drafter_and_outputs_are_closed_whole(engine: Engine) -> None:
    drafter = engine.drafter(3)
    outputs, _ = run(engine.loop(drafter), PROMPTS)
    assert not drafter.sessions
    assert sorted(drafter.outputs) == sorted(outputs)
    assert drafter.told <= sum(map(len, PROMPTS)) + sum(map(len, outputs))


def test_a_cancelled_request_leaves_the_others_alone(engine: Engine) -> None:
    drafter = engine.drafter(4)
    loop = engine.loop(drafter)
    first, second = (loop.begin(prompt, NUM_TOKENS) for prompt in PROMPTS[:2])
    tokens: list[int] = []
    for number in range(1000):
        tokens.extend(
            token for each in loop.step() if each.request is second for token in each.tokens
        )
        if number == 3:
            loop.cancel(first)
        if not loop.is_running:
            break
    assert tokens == engine.expected(PROMPTS[1])
    assert not drafter.sessions


def test_drafted_tokens_beyond_the_vocabulary_are_cut(engine: Engine) -> None:
    drafter = ScriptedDrafter(lambda tokens, _: [*engine.expected(tokens, 2), 64, 1 << 20])
    outputs, steps = run(engine.loop(drafter), PROMPTS[:2])
    assert outputs == [engine.expected(prompt) for prompt in PROMPTS[:2]]
    assert max(each.num_drafted for each in steps) == 2


def test_options_that_rule_drafts_out_cost_drafts_alone(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    loop = engine.loop(engine.drafter())
    tokens = list(loop.generate(PROMPTS[0], 12, repetition_penalty=1.5))
    assert len(tokens) == 12
    assert loop.num_drafted == 0
    assert [each for each in caplog.messages if "without drafts" in each]


def test_sampling_draws_from_the_model(engine: Engine) -> None:
    loop = engine.loop(engine.drafter(2))
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.01,
        "top_k": 8,
        "top_p": 0.9,
        "seed": 1,
    }
    tokens = list(loop.generate(PROMPTS[2], NUM_TOKENS, **options))
    assert tokens == engine.expected(PROMPTS[2])
    assert loop.num_accepted > 0


def test_the_embedded_drafter_learns_from_earlier_requests(engine: Engine) -> None:
    drafter = EmbeddedDrafter()
    passes = []
    for _ in range(2):
        loop = engine.loop(drafter)
        outputs, _ = run(loop, PROMPTS)
        assert outputs == [engine.expected(prompt) for prompt in PROMPTS]
        passes.append(loop.num_passes)
    assert passes[1] < 0.5 * passes[0]
    assert len(drafter.state.sessions) == 0


def test_a_prompt_of_no_tokens_is_the_engines_to_refuse(engine: Engine) -> None:
    loop = engine.loop(engine.drafter())
    with pytest.raises((RuntimeError, ValueError)):
        loop.begin(np.empty(0, np.int32), 4)
    assert not loop.is_running


def decoded(loop: DraftingLoop, prompt: list[int], **drafting: object) -> tuple[list[int], int]:
    """Return the output of a request, and how many drafted tokens were accepted for it."""
    request = loop.begin(prompt, NUM_TOKENS, drafting=drafting)
    steps = []
    while loop.is_running:
        steps += [each for each in loop.step() if each.request is request]
    assert steps[-1].statistics.num_accepted == sum(each.num_accepted for each in steps)
    return [token for each in steps for token in each.tokens], steps[-1].statistics.num_accepted


def test_requests_are_drafted_for_as_they_state(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    vocabulary = Vocabulary(VOCABULARY, "a" * 64)
    drafter = EmbeddedDrafter(vocabulary=vocabulary)
    loop = DraftingLoop(
        og.Engine(engine.model), drafter, VOCABULARY, vocabulary=vocabulary, tenants=["a", "b"]
    )
    prompt = PROMPTS[0]
    truth = engine.expected(prompt)

    def accepted(**drafting: object) -> int:
        output, count = decoded(loop, prompt, **drafting)
        assert output == truth
        return count

    check_drafts(accepted, truth, caplog, most_tokens=7, vocabulary_size=VOCABULARY)
    for drafting in ({"tenant": "c"}, {"budget": -1}, {"budgets": 1}, {"remember": "maybe"}):
        with pytest.raises(InvalidRequestError, match="foredraft_"):
            loop.begin(prompt, NUM_TOKENS, drafting=drafting)
    assert not loop.is_running
    assert loop.statistics.num_accepted == loop.num_accepted
    assert loop.statistics.accepted_per_position()[0] > 0


def test_an_engine_that_lacks_what_is_needed_is_refused_with_what(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LaterRequest:
        def begin_turn(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(og, "Request", LaterRequest)
    monkeypatch.delattr(og, "TurnOptions")
    with pytest.raises(UnsupportedEngineError) as caught:
        engine.loop(engine.drafter())
    assert "Request has no `set_draft_tokens`; TurnOptions is not there" in str(caught.value)
