"""The real mlx-lm on a CPU, with a tiny model; `make test-engine-mlx-lm` runs this."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="an extra: `make test-engine-mlx-lm`")

from mlx_lm import generate  # noqa: E402
from mlx_lm.generate import generate_step, speculative_generate_step  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.models.llama import Model, ModelArgs  # noqa: E402
from mlx_lm.sample_utils import make_logits_processors, make_sampler  # noqa: E402

from decoder.errors import UnsupportedEngineError  # noqa: E402
from decoder.plugins.mlx_lm import mlx_drafts as adapter  # noqa: E402
from decoder.plugins.mlx_lm.mlx_drafts import DraftsForMlx  # noqa: E402
from retriever.drafter import Drafter  # noqa: E402
from retriever.sessions.embedded import EmbeddedDrafter  # noqa: E402
from tests.decoder.engines.scripted import ScriptedDrafter  # noqa: E402

VOCABULARY = 128
NUM_TOKENS = 60
PROMPTS = [[7, 11, 13], [2, 3], [9], [33, 40, 41, 42, 43, 44], list(range(5, 60))]


@pytest.fixture(scope="module")
def model() -> Any:
    mx.random.seed(3)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    made = Model(
        ModelArgs(
            model_type="llama",
            **sizes,
            **heads,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
        )
    )
    made.set_dtype(mx.float32)
    mx.eval(made.parameters())
    return made


def plainly(model: Any, prompt: list[int], **options: Any) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS, **options)
    return [int(token) for token, _ in steps]


def drafted(
    model: Any, drafts: DraftsForMlx, prompt: list[int], width: int = 4, **options: Any
) -> tuple[list[int], int]:
    """Return an output, and how many of its tokens were drafted."""
    steps: Iterable[Any] = speculative_generate_step(
        mx.array(prompt),
        model,
        drafts,
        num_draft_tokens=width,
        max_tokens=NUM_TOKENS,
        **options,
    )
    found = [(int(token), from_draft) for token, _, from_draft in steps]
    return [token for token, _ in found], sum(from_draft for _, from_draft in found)


def scripted(model: Any, wrong_at: int = 0) -> ScriptedDrafter:
    known = [[*prompt, *plainly(model, prompt)] for prompt in PROMPTS]

    def continuation(tokens: list[int], number: int) -> list[int]:
        at = len(tokens)
        return next((each[at : at + number] for each in known if each[:at] == tokens), [])

    return ScriptedDrafter(continuation, wrong_at, VOCABULARY)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, 5])
def test_output_is_that_of_no_drafts_however_wrong_they_are(
    model: Any, wrong_at: int, width: int
) -> None:
    drafter = scripted(model, wrong_at)
    drafts = DraftsForMlx(drafter, VOCABULARY)
    for prompt in PROMPTS:
        output, from_draft = drafted(model, drafts, prompt, width)
        assert output == plainly(model, prompt)
        if wrong_at == 0:
            assert from_draft >= NUM_TOKENS * width // (width + 1) - width
    drafts.close()
    assert not drafter.sessions
    assert drafts.sessions.num_failures == 0


def test_the_drafter_is_told_the_sequence_and_new_tokens_alone(model: Any) -> None:
    drafter = scripted(model, 3)
    drafts = DraftsForMlx(drafter, VOCABULARY)
    for prompt in PROMPTS[3:]:
        output, from_draft = drafted(model, drafts, prompt)
        drafts.close()
        told = drafter.outputs[-1]
        assert told == output[: len(told)]
        assert len(told) >= NUM_TOKENS - 5
        assert from_draft > 0
    assert drafter.told <= sum(map(len, PROMPTS)) + len(PROMPTS) * NUM_TOKENS
    statistics = drafts.statistics
    assert statistics.num_accepted > 0
    assert statistics.accepted_per_position()[0] > statistics.accepted_per_position()[-1]


def test_sampling_with_a_seed_draws_the_same(model: Any) -> None:
    """The sampler draws once for each row, drafted or not: with a certain draft of each token."""
    sampler = make_sampler(temp=0.0)
    processors = make_logits_processors(repetition_penalty=1.3)
    drafts = DraftsForMlx(scripted(model, 2), VOCABULARY)
    for prompt in PROMPTS[:2]:
        plain = plainly(model, prompt, sampler=sampler, logits_processors=processors)
        output, _ = drafted(model, drafts, prompt, sampler=sampler, logits_processors=processors)
        assert output == plain


def test_outputs_are_remembered(model: Any) -> None:
    drafts = DraftsForMlx(EmbeddedDrafter(), VOCABULARY)
    counts = [drafted(model, drafts, PROMPTS[0], 8)[1] for _ in range(2)]
    assert counts[1] > counts[0]
    assert counts[1] > NUM_TOKENS * 3 // 4


def test_a_drafter_that_goes_away_in_the_middle_costs_drafts_alone(model: Any) -> None:
    for failure in (None, RuntimeError("our bug")):
        drafter = scripted(model)
        drafter.failure = failure or drafter.failure
        drafts = DraftsForMlx(drafter, VOCABULARY)
        tokens = []
        for token, *_ in speculative_generate_step(
            mx.array(PROMPTS[0]), model, drafts, num_draft_tokens=4, max_tokens=NUM_TOKENS
        ):
            tokens.append(int(token))
            drafter.is_away = 20 < len(tokens) < 40
        assert tokens == plainly(model, PROMPTS[0])


def test_a_prompt_that_is_kept_is_gone_on_with(model: Any) -> None:
    """As a server does: caches of a prompt are copied, and each copy is a sequence of its own."""
    drafts: Drafter | Any = DraftsForMlx(scripted(model), VOCABULARY)
    kept = [*make_prompt_cache(model), *make_prompt_cache(drafts)]
    prompt = PROMPTS[3]
    for _ in speculative_generate_step(
        mx.array(prompt[:-1]), model, drafts, num_draft_tokens=2, max_tokens=1, prompt_cache=kept
    ):
        pass
    for cache in kept:
        cache.trim(cache.offset - len(prompt[:-1]) + 1)
    for _ in range(2):
        steps = speculative_generate_step(
            mx.array(prompt[-2:]),
            model,
            drafts,
            num_draft_tokens=4,
            max_tokens=NUM_TOKENS,
            prompt_cache=copy.deepcopy(kept),
        )
        assert [int(token) for token, *_ in steps] == plainly(model, prompt)


def test_an_mlx_lm_that_calls_otherwise_is_refused_with_what_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def later(prompt: Any, model: Any, proposer: Any, **options: Any) -> None: ...

    monkeypatch.setattr(adapter, "speculative_generate_step", later)
    with pytest.raises(UnsupportedEngineError, match="has no parameter `draft_model`"):
        DraftsForMlx(EmbeddedDrafter(), VOCABULARY)
    assert callable(generate)
