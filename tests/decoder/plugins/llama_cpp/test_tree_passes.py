"""Draft trees in the real engine; `make test-engine-llama-cpp` runs this."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

llama_cpp = pytest.importorskip("llama_cpp", reason="an extra: `make test-engine-llama-cpp`")

from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # noqa: E402

from decoder.drafters.following import NoDrafter  # noqa: E402
from decoder.drafters.fusion import FusedDrafter, warm  # noqa: E402
from decoder.plugins.llama_cpp import attach, tree_passes  # noqa: E402
from decoder.plugins.llama_cpp.tree_passes import sequences_of, within_paths  # noqa: E402
from retriever.drafter import DraftRequest  # noqa: E402
from retriever.sessions.embedded import EmbeddedDrafter  # noqa: E402
from retriever.tree import ROOT, DraftTree, Source  # noqa: E402
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

PROMPTS = [[1, 70, 71, 72, 73], [1, *range(40, 60)], [1, 100]]


class Branching(ScriptedDrafter):
    """Drafts trees that have what the model says, among other tokens and at any place.

    Args:
        known: sequences that the model writes.
        seed: of what else is drafted.
        truth: how often the model's own token is in the tree.
    """

    def __init__(self, known: Sequence[list[int]], seed: int = 0, truth: float = 0.8) -> None:
        super().__init__(lambda *_: [], 0, tiny_model.VOCABULARY)
        self.known = known
        self.random = np.random.default_rng(seed)
        self.truth = truth

    def tree(self, request: DraftRequest) -> DraftTree:
        super().tree(request)
        tokens = self.sessions[request.session]
        at = len(tokens)
        coming = next((each[at:] for each in self.known if each[:at] == tokens), [])
        nodes: list[tuple[int, int, int]] = []  # token, parent, how many tokens are right up to it
        right: dict[int, int] = {ROOT: 0}
        for _ in range(int(self.random.integers(1, 13))):
            parent = int(self.random.choice(list(right)))
            parent = max(right, key=right.__getitem__) if self.random.random() < 0.6 else parent
            depth = right[parent]
            token = int(self.random.integers(2, tiny_model.VOCABULARY))
            is_right = 0 <= depth < len(coming) and self.random.random() < self.truth
            token = coming[depth] if is_right else token
            if any(each[:2] == (token, parent) for each in nodes):
                continue
            goes_on = 0 <= depth < len(coming) and token == coming[depth]
            right[len(nodes)] = depth + 1 if goes_on else -1
            nodes.append((token, parent, 0))
        probabilities = 0.95 ** np.arange(1, len(nodes) + 1)
        return DraftTree.checked(
            [node[0] for node in nodes],
            [node[1] for node in nodes],
            probabilities,
            [Source.CONTEXT] * len(nodes),
        )


@pytest.fixture(scope="module")
def known(plain: Any) -> list[list[int]]:
    return [[*prompt, *from_nothing(plain, prompt, NUM_TOKENS + 16)] for prompt in PROMPTS]


@pytest.mark.parametrize("seed", range(12))
def test_greedy_output_is_that_of_no_drafts_wherever_the_right_tokens_stand(
    llm: Any, plain: Any, known: list[list[int]], seed: int
) -> None:
    ours = attach(llm, Branching(known, seed), measure=False, recycle=False)
    for prompt in PROMPTS:
        output = from_nothing(llm, prompt)
        assert output == from_nothing(plain, prompt)
        check_logits(llm, plain, [*prompt, *output], len(prompt))
    assert ours.num_accepted > 0.2 * len(PROMPTS) * NUM_TOKENS
    assert ours.num_failures == 0


def check_logits(llm: Any, plain: Any, tokens: list[int], start: int) -> None:
    """Whether what a model kept behind each token is the other's: outputs alone hide much."""
    for end in range(start, llm.n_tokens + 1):
        if end == start:
            plain.reset()
        plain.eval(tokens[plain.n_tokens : end])
        expected = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits_ith(plain.ctx, -1), shape=(tiny_model.VOCABULARY,)
        )
        ROUNDING.check(llm.scores[end - 1], expected)


def test_each_pass_accepts_the_longest_path_that_the_model_says(
    llm: Any, plain: Any, known: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that a tree has are read once, and the pass ends at the first that it has not."""
    widths: list[int] = []
    decode = llama_cpp.llama_decode

    def counting(context: Any, batch: Any) -> int:
        widths.append(int(batch.n_tokens))
        return int(decode(context, batch))

    ours = attach(llm, Branching(known, 3), measure=False, recycle=False)
    monkeypatch.setattr("llama_cpp.llama_cpp.llama_decode", counting)
    for prompt in PROMPTS:
        assert from_nothing(llm, prompt) == from_nothing(plain, prompt)
    ours.end()
    widths = [width for width in widths if width]
    report = ours.statistics
    assert sum(1 for width in widths if width > 1) > 20
    assert len(PROMPTS) * NUM_TOKENS - ours.num_passes - len(PROMPTS) >= ours.num_accepted > 50
    assert report.num_drafted == sum(count * width for width, count in report.widths.items())


def test_logits_that_are_learned_are_the_models_own_behind_each_node(
    llm: Any, plain: Any, known: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    attach(llm, Branching(known, 5), measure=False)
    from_nothing(llm, PROMPTS[1], 40)
    assert len(rows) > 60
    for tokens, logits in rows[:: len(rows) // 30]:
        plain.reset()
        plain.eval(tokens)
        expected = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits_ith(plain.ctx, -1), shape=(tiny_model.VOCABULARY,)
        )
        ROUNDING.check(logits, expected)


SAMPLING: list[dict[str, Any]] = [
    {"temp": 0.9, "top_k": 20, "top_p": 0.9},
    {"temp": 0.7, "repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temp": 0.8, "mirostat_mode": 1},
    {"temp": 0.8, "mirostat_mode": 2},
    {"temp": 0.0, "repeat_penalty": 1.5},
]


@pytest.mark.parametrize("settings", SAMPLING)
def test_sampling_with_a_seed_draws_the_same(
    llm: Any, plain: Any, settings: dict[str, Any]
) -> None:
    truth = [from_nothing(plain, prompt, **settings) for prompt in PROMPTS]
    drawn = [[*prompt, *each] for prompt, each in zip(PROMPTS, truth, strict=True)]
    ours = attach(llm, Branching(drawn, 1), measure=False, recycle=False)
    assert [from_nothing(llm, prompt, **settings) for prompt in PROMPTS] == truth
    assert ours.num_accepted > 20


GRAMMAR = 'root ::= ("ab" | "ba" | "c" [a-d])+'


def test_grammars_and_processors_see_chosen_tokens_alone(
    llm: Any, plain: Any, known: list[list[int]]
) -> None:
    """As often as without drafts, in the same order, and so do stopping criteria."""

    def run(model: Any) -> tuple[list[int], list[list[int]], list[list[int]]]:
        seen, asked = list[list[int]](), list[list[int]]()

        def processor(tokens: Any, scores: Any) -> Any:
            seen.append(tokens.tolist())
            return scores * 0.9

        def stops(tokens: Any, _: Any) -> bool:
            asked.append(tokens.tolist())
            return len(tokens) > 40

        output = from_nothing(
            model,
            PROMPTS[0],
            logits_processor=llama_cpp.LogitsProcessorList([processor]),
            stopping_criteria=llama_cpp.StoppingCriteriaList([stops]),
        )
        return output, seen, asked

    ours = attach(llm, Branching(known), measure=False, recycle=False)
    expected = run(plain)
    assert run(llm) == expected
    assert 30 < len(expected[0]) < NUM_TOKENS
    assert ours.num_accepted > 10

    def constrained(model: Any) -> Any:
        grammar = llama_cpp.LlamaGrammar.from_string(GRAMMAR, verbose=False)
        return from_nothing(model, PROMPTS[0], 40, grammar=grammar, temp=0.8)

    truth = constrained(plain)
    ours = attach(llm, Branching([[*PROMPTS[0], *truth]]), measure=False, recycle=False)
    assert constrained(llm) == truth
    assert ours.num_accepted > 10


@pytest.mark.parametrize("stream", [False, True])
def test_completions_stop_and_stream_as_without_drafts(
    path: Path,
    llm: Any,
    known: list[list[int]],
    stream: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    keeping = load(path, logits_all=True)
    attach(llm, Branching(known), measure=False)
    text = keeping.detokenize(known[0][20:23]).decode(errors="ignore")
    options = {"max_tokens": 48, "temperature": 0.0, "logprobs": 2, "stop": [text or "x"]}
    found = []
    for model in (keeping, llm):
        made = model.create_completion(known[0][:5], stream=stream, **options)
        found.append([each["choices"][0] for each in (made if stream else [made])])
    alone, ours = found
    assert [each["text"] for each in ours] == [each["text"] for each in alone]
    assert [each["finish_reason"] for each in ours] == [each["finish_reason"] for each in alone]
    for one, other in zip(alone, ours, strict=True):
        if one["logprobs"]:
            expected, got = one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"]
            ROUNDING.check(got, expected, scale=LOGITS)


def test_a_stream_that_is_left_at_any_token_leaves_a_cache_as_without_drafts(
    llm: Any, plain: Any, known: list[list[int]]
) -> None:
    """The next prompt goes on from it, with all of it, a part, and with other tokens behind."""
    ours = attach(llm, Branching(known, 2), measure=False, recycle=False)
    for left_at in range(1, 24):
        for kept in (left_at - 1, left_at, left_at + 1, left_at // 2):
            expected = from_nothing(llm, PROMPTS[0], left_at)
            behind = [*PROMPTS[0], *expected[: max(kept, 0)]]
            assert generated(llm, behind, 20) == from_nothing(plain, behind, 20)
            assert from_nothing(llm, PROMPTS[0], left_at) == expected
            llm.save_state()
            assert generated(llm, behind, 20) == from_nothing(plain, behind, 20)
            assert from_nothing(llm, PROMPTS[0], left_at) == expected
            after = [*behind, 99]
            output = generated(llm, after, 6)
            assert output == from_nothing(plain, after, 6)
            check_logits(llm, plain, [*after, *output], len(after))
    assert ours.num_accepted > 200
    assert ours.num_failures == 0


def test_tokens_that_a_caller_sends_are_read_in_their_place(
    path: Path, llm: Any, known: list[list[int]]
) -> None:
    """The engine takes them for drafts, whose logits it has with `logits_all` alone."""

    def run(model: Any) -> list[int]:
        model.reset()
        stream = model.generate(PROMPTS[0], temp=0.0)
        sent = [None, *([50, 51] if number % 7 == 5 else None for number in range(30))]
        return [stream.send(tokens) for tokens in sent]

    attach(llm, Branching(known, 2), measure=False, recycle=False)
    assert run(llm) == run(load(path, logits_all=True))


@pytest.mark.parametrize("left_at", [1, 4, 5, 6, 7, 13])
def test_states_are_those_of_the_engine_alone(
    path: Path, llm: Any, plain: Any, known: list[list[int]], left_at: int
) -> None:
    """One that is saved between two tokens of a pass is loaded by a model without drafts, too."""
    attach(llm, Branching(known, 2), measure=False, recycle=False)
    llm.reset()
    stream = llm.generate(PROMPTS[0], temp=0.0)
    first = list(islice(stream, left_at))
    state = llm.save_state()
    rest = list(islice(stream, 20))
    assert [*first, *rest] == from_nothing(plain, PROMPTS[0], left_at + 20)
    behind = [*PROMPTS[0], *first]
    alone = load(path, logits_all=True)
    for model in (alone, llm):
        model.load_state(state)
        assert model.n_tokens == len(behind) - 1
        assert generated(model, behind, 20) == rest
        check_logits(model, plain, [*behind, *rest], len(behind))
    alone.reset()
    generated(alone, PROMPTS[1], 3)
    llm.load_state(alone.save_state())
    assert generated(llm, PROMPTS[1], 20) == from_nothing(plain, PROMPTS[1], 20)


def test_a_state_that_is_loaded_within_a_stream_is_not_mixed_with_the_last_pass(
    llm: Any, plain: Any, known: list[list[int]]
) -> None:
    attach(llm, Branching(known, 2), measure=False, recycle=False)
    llm.reset()
    stream = llm.generate(PROMPTS[0], temp=0.0)
    tokens = list(islice(stream, 6))
    state = llm.save_state()
    tokens += islice(stream, 5)
    from_nothing(llm, PROMPTS[1], 9)
    llm.load_state(state)
    behind = [*PROMPTS[0], *tokens]
    output = generated(llm, behind, 20)
    assert output == from_nothing(plain, behind, 20)
    check_logits(llm, plain, [*behind, *output], len(behind))


@pytest.mark.parametrize("left_at", range(3, 15))
def test_a_stream_goes_on_from_a_state_that_is_loaded_in_its_middle(
    path: Path, llm: Any, plain: Any, known: list[list[int]], left_at: int
) -> None:
    """One of as many other tokens: nothing of the last pass is left, as without drafts."""
    ours = attach(llm, Branching(known, 2), measure=False, recycle=False)
    other = load(path, logits_all=True)
    other.eval(known[1][: len(PROMPTS[0]) + left_at - 1])
    state = other.save_state()

    def run(model: Any) -> list[int]:
        model.reset()
        stream = model.generate(PROMPTS[0], temp=0.0)
        tokens = list(islice(stream, left_at))
        model.load_state(state)
        return [*tokens, *islice(stream, 10)]

    output = run(llm)
    assert output == run(plain)
    after = llm.input_ids[: llm.n_tokens].tolist()
    assert after[-9:] == output[-10:-1]
    check_logits(llm, plain, after, len(after) - 9)
    assert ours.num_failures == 0


@pytest.mark.parametrize(
    ("n_ctx", "n_batch", "n_ubatch"), [(64, 8, 8), (100, 8, 8), (100, 8, 3), (100, 8, 1), (9, 4, 4)]
)
def test_a_full_context_ends_as_without_drafts(
    path: Path, n_ctx: int, n_batch: int, n_ubatch: int
) -> None:
    """No cell of a rejected node is left behind: each prompt fills the context to its end.

    With `n_ubatch=1` there are no two sequences, and chains are drafted; a context or batch of a
    few tokens has no room for the tree that is compared with its paths, and nothing is compared.
    """
    widths = {"n_batch": n_batch, "n_ubatch": n_ubatch}
    plain, ours = load(path, n_ctx=n_ctx), load(path, n_ctx=n_ctx, logits_all=True, **widths)
    number = n_ctx - len(PROMPTS[0])
    truth = from_nothing(plain, PROMPTS[0], number)
    draft_model = attach(ours, Branching([[*PROMPTS[0], *truth]]), measure=False, recycle=False)
    for _ in range(6):
        assert from_nothing(ours, PROMPTS[0], number) == truth
    assert max(draft_model.statistics.widths) < n_batch
    assert draft_model.num_failures == 0


def test_a_drafter_that_fails_in_the_middle_costs_drafts_alone(
    llm: Any, plain: Any, known: list[list[int]]
) -> None:
    drafter = Branching(known)
    drafter.failure = RuntimeError("our bug")
    ours = attach(llm, drafter, measure=False, recycle=False)
    llm.reset()
    tokens = []
    for token in islice(llm.generate(PROMPTS[0], temp=0.0), NUM_TOKENS):
        tokens.append(token)
        drafter.is_away = 15 < len(tokens) < 40
    assert tokens == from_nothing(plain, PROMPTS[0])
    assert ours.num_failures > 0
    assert ours.num_accepted > 0


def test_where_the_engine_refuses_a_tree_the_token_is_read_alone(
    llm: Any, plain: Any, known: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = attach(llm, Branching(known, 4), measure=False, recycle=False)
    decode = type(llm._ctx).decode

    def refusing(context: Any, batch: Any) -> None:
        if batch.n_tokens() > 4 and batch.batch.n_seq_id[0] > 1:
            raise RuntimeError("llama_decode returned 1")
        decode(context, batch)

    monkeypatch.setattr(type(llm._ctx), "decode", refusing)
    for prompt in PROMPTS:
        assert from_nothing(llm, prompt) == from_nothing(plain, prompt)
    assert 0 < ours.num_failures <= 4  # each halves what is drafted
    assert ours.num_accepted > 0


def test_calls_state_how_they_are_drafted_for(llm: Any, plain: Any) -> None:
    ours = attach(llm, EmbeddedDrafter(), measure=False, tenants=["a", "b"])
    prompt = PROMPTS[1]
    truth = from_nothing(plain, prompt)

    def accepted(**stated: Any) -> int:
        with ours.request(**stated) as request:
            assert from_nothing(llm, prompt) == truth
        budget = stated.get("budget")
        assert budget is None or max(request.statistics.widths, default=0) <= budget
        return request.statistics.num_accepted

    cold = accepted(tenant="a")
    assert accepted(tenant="a") > cold
    assert accepted(tenant="b") == cold
    assert accepted(tenant="a", drafts=False) == accepted(tenant="a", budget=0) == 0
    assert accepted(tenant="a", budget=2) > 0
    assert accepted(predictions=truth) > cold


def test_what_pays_is_measured_and_the_output_is_the_same(llm: Any, plain: Any) -> None:
    ours = attach(llm, EmbeddedDrafter())
    for prompt in PROMPTS * 2:
        assert from_nothing(llm, prompt) == from_nothing(plain, prompt)
    assert ours.num_passes > 0
    assert ours.num_failures == 0


def test_trees_take_fewer_passes_than_chains_of_as_many_tokens(path: Path, plain: Any) -> None:
    """From the model's own earlier logits, which know several next tokens."""
    passes = {}
    for trees in (True, False):
        llm = load(path, logits_all=True)
        ours = attach(llm, NoDrafter(), measure=False, num_pred_tokens=10, trees=trees)
        for prompt in PROMPTS * 2:
            assert from_nothing(llm, prompt) == from_nothing(plain, prompt)
        passes[trees] = ours.num_passes
    assert passes[True] < passes[False]


def test_draft_models_take_turns_on_one_model(llm: Any, plain: Any, known: list[list[int]]) -> None:
    settings: dict[str, Any] = {"measure": False, "recycle": False}
    models = [
        attach(llm, Branching(known, 1), trees=False, **settings),
        attach(llm, Branching(known, 2), num_pred_tokens=8, **settings),
        attach(llm, Branching(known, 3), num_pred_tokens=12, **settings),
        LlamaPromptLookupDecoding(2, 10),
        None,
    ]
    for turn in range(12):
        llm.draft_model = models[(turn * 3) % len(models)]
        prompt = [*PROMPTS[turn % 3], *([90] * (turn % 2))]
        assert generated(llm, prompt, 9 + turn) == from_nothing(plain, prompt, 9 + turn)
    assert all(each.num_failures == 0 for each in models[:3])


def test_a_model_that_is_closed_frees_the_context_that_took_the_place_of_its_own(llm: Any) -> None:
    first = llm._ctx
    attach(llm, NoDrafter(), measure=False)
    assert first.ctx is None
    second = llm._ctx
    assert llama_cpp.llama_n_seq_max(second.ctx) == 16
    llm.close()
    assert second.ctx is None


def test_a_model_that_sees_siblings_drafts_chains_and_says_so(
    llm: Any,
    plain: Any,
    known: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one that verifies trees wrongly would: every node is in all sequences."""

    def all_of_them(tree: DraftTree) -> list[range]:
        return [range(max(path.stop for path in sequences_of(tree)))] * len(tree)

    monkeypatch.setattr(tree_passes, "sequences_of", all_of_them)
    attach(llm, Branching(known), measure=False)
    assert "this model's logits differ in trees" in caplog.text
    for prompt in PROMPTS:
        assert from_nothing(llm, prompt) == from_nothing(plain, prompt)


def test_an_engine_whose_loop_draws_by_itself_drafts_chains_and_says_so(
    llm: Any,
    plain: Any,
    known: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a later version may: it would take a node's token from the logits of another one."""
    engine: Any = llama_cpp.Llama
    draw = engine.sample

    class Later(engine):  # type: ignore[misc]  # the engine is not typed here
        """Its `generate` finds no `sample` that an instance was given."""

        def __getattribute__(self, name: str) -> Any:
            own = draw.__get__(self) if name == "sample" else None
            return own or super().__getattribute__(name)

    monkeypatch.setattr(llm, "__class__", Later)
    attach(llm, Branching(known), measure=False)
    assert "does not call Llama.sample" in caplog.text
    for prompt in PROMPTS:
        assert from_nothing(llm, prompt) == from_nothing(plain, prompt)


def test_where_no_context_of_several_sequences_is_made_the_first_one_comes_back(
    llm: Any,
    plain: Any,
    known: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make = llama_cpp.llama_init_from_model

    def making(model: Any, parameters: Any) -> Any:
        return make(model, parameters) if parameters.n_seq_max == 1 else None

    monkeypatch.setattr("llama_cpp.llama_cpp.llama_init_from_model", making)
    attach(llm, Branching(known), measure=False)
    assert "cannot create a context for draft trees" in caplog.text
    for prompt in PROMPTS:
        assert from_nothing(llm, prompt) == from_nothing(plain, prompt)


def test_an_adapter_is_set_on_the_new_context_too(path: Path, tmp_path: Path) -> None:
    lora = tmp_path / "lora.gguf"
    tiny_model.write_adapter(lora)
    options: dict[str, Any] = {"lora_path": str(lora), "lora_scale": 2.0}
    plain, ours = load(path, **options), load(path, logits_all=True, **options)
    truth = [from_nothing(plain, prompt) for prompt in PROMPTS]
    assert truth != [from_nothing(load(path), prompt) for prompt in PROMPTS]
    adapted = [[*prompt, *each] for prompt, each in zip(PROMPTS, truth, strict=True)]
    draft_model = attach(ours, Branching(adapted), measure=False, recycle=False)
    assert [from_nothing(ours, prompt) for prompt in PROMPTS] == truth
    assert draft_model.num_accepted > 20


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 20)))]
    probabilities = 0.9 ** np.arange(1, len(parents) + 1)
    return DraftTree.checked(
        np.arange(len(parents)), parents, probabilities, [Source.CONTEXT] * len(parents)
    )


def leaves(tree: DraftTree) -> Iterator[int]:
    return (node for node in range(len(tree)) if node not in tree.parents)


@given(trees())
def test_the_sequences_of_a_node_are_those_of_the_paths_through_it(tree: DraftTree) -> None:
    sequences = sequences_of(tree)
    of_leaf = {leaf: list(sequences[leaf]) for leaf in leaves(tree)}
    assert sorted(number for (number,) in of_leaf.values()) == list(range(len(of_leaf)))
    for node in range(len(tree)):
        through = [leaf for leaf in of_leaf if node in tree.path_to(leaf)]
        assert list(sequences[node]) == sorted(of_leaf[leaf][0] for leaf in through)


@given(trees(), st.integers(1, 20))
def test_a_tree_is_cut_before_it_has_too_many_paths(tree: DraftTree, most: int) -> None:
    cut = within_paths(tree, most)
    assert len(list(leaves(cut))) <= most
    if len(cut) < len(tree):
        assert len(list(leaves(tree.prefix(len(cut) + 1)))) > most
