"""`foredraft.verify`: what a loop of one's own needs, by its definition and with a model."""

import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from decoder.sampling.sampling_settings import SamplingSettings
from foredraft import verify
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import (
    VOCABULARY,
    WINDOW,
    plainly,
    prompt_of,
    random_tree,
    tiny_gemma,
    tiny_llama,
)

ROOT_OF_PROJECT = Path(__file__).parents[2]
PROGRAMS = ("own_loop.py", "own_loop_torch.py")
PRINTED = {
    "own_loop.py": "3.4 tokens per pass: \n"
    "def add_8(x):\n    return x + 8\n\n\ndef add_9(x):\n   \n",
    "own_loop_torch.py": "10 12 11 45 22 17 9 19 19 19 19 19 19 19 19 19 19 19 19 19 ...\n"
    "5.7 tokens per pass\n",
}


def seen_by_definition(tree: DraftTree, past: int, window: int | None) -> np.ndarray[Any, Any]:
    """Return who sees whom, key by key."""
    paths = [[0], *([0, *(tree.path_to(node) + 1).tolist()] for node in range(len(tree)))]
    stands = [past + len(path) - 1 for path in paths]
    seen = np.zeros((len(paths), past + len(paths)), bool)
    for row, path in enumerate(paths):
        for key in range(past):
            seen[row, key] = window is None or stands[row] - key < window
        for other in path:
            seen[row, past + other] = window is None or stands[row] - stands[other] < window
    return seen


@pytest.mark.parametrize("past", [0, 1, 9])
@pytest.mark.parametrize("window", [None, 1, 3, 30])
def test_masks_and_positions_are_those_of_the_definition(past: int, window: int | None) -> None:
    rng = np.random.default_rng(past)
    for size in (0, 1, 5, 20):
        tree = random_tree(rng, size)
        expected = seen_by_definition(tree, past, window)
        np.testing.assert_array_equal(verify.mask(tree, past, window), expected)
        added = verify.additive_mask(tree, past, torch.bfloat16, window)
        assert (added.shape, added.dtype) == ((1, 1, *expected.shape), torch.bfloat16)
        np.testing.assert_array_equal(added[0, 0].float().numpy() == 0, expected)
        assert added.min() == torch.finfo(torch.bfloat16).min or expected.all()
        depths = [0, *tree.depths().tolist()]
        np.testing.assert_array_equal(verify.positions(tree, past), past + np.array(depths))
        read = verify.tokens(7, tree)
        assert read[0] == 7
        assert read.dtype == np.dtype(np.int64)
        np.testing.assert_array_equal(read[1:], tree.token_ids)


def tree_of_choices(choices: list[int]) -> DraftTree:
    """Return a chain of what was chosen, with a wrong sibling before each node."""
    tokens, parents, last = [], [], ROOT
    for token in choices:
        tokens += [token + 1, token]
        parents += [last, last]
        last = len(tokens) - 1
    falling = [0.9**node for node in range(len(tokens))]
    return DraftTree.checked(tokens, parents, falling, [0] * len(tokens))


def test_the_longest_path_that_was_chosen_is_accepted_and_its_rows_are_kept() -> None:
    tree = tree_of_choices([3, 5, 9])
    choices = np.zeros(7, np.int64)
    choices[[0, 2, 4, 6]] = 3, 5, 9, 11
    path, token = verify.accept(tree, choices.tolist())
    assert (path.tolist(), token) == ([1, 3, 5], 11)
    assert verify.kept_rows(path).tolist() == [0, 2, 4, 6]
    choices[2] = 6  # the wrong sibling, behind which nothing was drafted
    path, token = verify.accept(tree, choices)
    assert (path.tolist(), token) == ([1, 2], 0)
    choices[0] = 8
    path, token = verify.accept(tree, choices)
    assert (path.tolist(), token) == ([], 8)
    assert verify.kept_rows(path).tolist() == [0]
    with pytest.raises(ValueError, match=r"\(3,\) choices for a pass of 7 rows"):
        verify.accept(tree, [1, 2, 3])


def test_greedy_acceptance_takes_logits() -> None:
    logits = torch.full((3, 12), -1.0)
    logits[0, 4] = logits[1, 7] = logits[2, 2] = 1.0
    tree = DraftTree.checked([5, 4], [ROOT, ROOT], [0.5, 0.5], [0, 0])
    path, token = verify.accept_greedy(tree, logits)
    assert (path.tolist(), token) == ([1], 2)


def test_sampled_acceptance_leaves_the_distribution_as_it_is() -> None:
    """Of 2,000 pairs of tokens, drafted or not, shares are those of the target's distribution."""
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(size=(1 + 4, 6)).astype(np.float32))
    tree = DraftTree.checked([2, 4, 1, 3], [ROOT, ROOT, 0, 0], [0.6, 0.5, 0.3, 0.2], [0] * 4)
    settings = SamplingSettings(0.8, top_k=4)
    first = np.zeros(6)
    behind_2 = np.zeros(6)
    for _ in range(2_000):
        path, token = verify.accept_sampled(tree, logits, settings, rng.random(3))
        written = [*tree.token_ids[path].tolist(), token]
        first[written[0]] += 1
        if written[0] == 2:
            behind_2[written[1]] += 1
    for counts, row in ((first, 0), (behind_2, 1)):
        scores = logits[row] / 0.8
        scores[scores < scores.topk(4).values[-1]] = -torch.inf
        expected = scores.softmax(-1).numpy() * counts.sum()
        possible = expected > 0
        assert not counts[~possible].any()
        statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        assert statistic < 16.3  # of chi-square with 3 degrees, one in a thousand is beyond


def test_logits_and_points_may_be_of_numpy_or_torch() -> None:
    rng = np.random.default_rng(1)
    tree = random_tree(rng, 9)
    logits, points = rng.normal(size=(10, VOCABULARY)).astype(np.float32), rng.random(10)
    settings = SamplingSettings(0.9, top_p=0.9)
    for accept in (
        verify.accept_greedy,
        partial(verify.accept_sampled, settings=settings, points=points),
        partial(verify.accept_sampled, settings=settings, points=points.tolist()),
    ):
        (path, token), (other, again) = accept(tree, logits), accept(tree, torch.tensor(logits))
        assert (path.tolist(), token) == (other.tolist(), again)
    for wrong in (logits[:9], logits[None]):
        with pytest.raises(ValueError, match=r" for a pass of 10 rows"):
            verify.accept_greedy(tree, wrong)
        with pytest.raises(ValueError, match=r"logits \(.* for a pass of 10 rows"):
            verify.accept_sampled(tree, wrong, settings, points)


def test_a_model_with_windows_takes_a_mask_for_each_kind_of_layer() -> None:
    """As the page says; with one mask for both kinds some logits differ."""
    model, past = tiny_gemma(), 20
    tree = random_tree(np.random.default_rng(2), 12)
    whole, window = additive_masks(tree, past, WINDOW)
    found, alone = (
        read_behind(model, tree, past, masks)
        for masks in ({"full_attention": whole, "sliding_attention": window}, whole)
    )
    context = prompt_of(past + 1)
    for node in range(len(tree)):
        tokens = [*context, *tree.token_ids[tree.path_to(node)].tolist()]
        expected = model(torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(found[1 + node], expected, atol=1e-4, rtol=1e-4)
    assert (found - alone).abs().max() > 1e-2


def additive_masks(tree: DraftTree, past: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    masks = [verify.additive_mask(tree, past, torch.float32, each) for each in (None, window)]
    return masks[0], masks[1]


@torch.no_grad()
def read_behind(model: Any, tree: DraftTree, past: int, masks: Any) -> torch.Tensor:
    """Return the logits of a pass, by a cache that holds all tokens."""
    context, cache = prompt_of(past + 1), DynamicCache()
    model(torch.tensor([context[:-1]]), past_key_values=cache)
    logits: torch.Tensor = model(
        torch.from_numpy(verify.tokens(context[-1], tree) % VOCABULARY)[None],
        attention_mask=masks,
        position_ids=torch.from_numpy(verify.positions(tree, past))[None],
        past_key_values=cache,
    ).logits[0]
    return logits


def test_what_sampling_cannot_follow_is_refused() -> None:
    tree, logits = DraftTree.checked([1], [ROOT], [0.5], [0]), torch.zeros(2, 4)
    for settings in (SamplingSettings(), SamplingSettings(0.7, presence_penalty=1.0)):
        with pytest.raises(ValueError, match="supports only a temperature above 0"):
            verify.accept_sampled(tree, logits, settings, np.zeros(9))
    with pytest.raises(ValueError, match="1 points for a tree of depth 1"):
        verify.accept_sampled(tree, logits, SamplingSettings(0.7), np.zeros(1))


def test_masks_need_no_more_than_numpy() -> None:
    script = "from foredraft import DraftTree, verify; print(verify.mask(DraftTree.empty(), 2))"
    script += "; import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert (done.returncode, done.stdout.strip()) == (0, b"[[ True  True  True]]")


def test_a_loop_with_them_writes_what_the_model_writes() -> None:
    """With random trees that hold the right path; a wrong mask, position or row would show."""
    model, prompt = tiny_llama(), prompt_of(20)
    truth = plainly(model, prompt, 40)
    rng = np.random.default_rng(0)
    tokens: list[int] = list(prompt)
    num_passes = 0
    cache: Any = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]), past_key_values=cache)
        while len(tokens) < len(prompt) + 40:
            done = len(tokens) - len(prompt)
            tree = tree_of_choices(truth[done : done + int(rng.integers(0, 5))])
            past = len(tokens) - 1
            logits = model(
                torch.from_numpy(verify.tokens(tokens[-1], tree) % VOCABULARY)[None],
                attention_mask=verify.additive_mask(tree, past, model.dtype),
                position_ids=torch.from_numpy(verify.positions(tree, past))[None],
                past_key_values=cache,
            ).logits[0]
            path, token = verify.accept_greedy(tree, logits)
            kept = np.concatenate([np.arange(past), past + verify.kept_rows(path)])
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
            tokens += [*tree.token_ids[path].tolist(), token]
            num_passes += 1
    assert tokens[len(prompt) :][:40] == truth
    assert num_passes < 25


def test_the_programs_are_short() -> None:
    for name in PROGRAMS:
        assert len((ROOT_OF_PROJECT / "examples" / name).read_text().splitlines()) <= 40


@pytest.mark.programs
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_it_saves(name: str) -> None:
    done = subprocess.run(
        [sys.executable, f"examples/{name}"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT_OF_PROJECT,
    )
    assert done.stdout == PRINTED[name]


@pytest.mark.programs
def test_the_program_with_transformers_writes_what_generate_writes() -> None:
    names = runpy.run_path(str(ROOT_OF_PROJECT / "examples" / "own_loop.py"))
    model, tokenizer = names["loaded"].model, names["loaded"].tokenizer
    for text in (names["text"], "What is a suffix array, and what is it for?", "1 2 3 4 5 6 7 8"):
        prompt = tokenizer(text)["input_ids"]
        found, _ = names["generate"](prompt, 40)
        options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
        [whole] = model.generate(torch.tensor([prompt]), **options).tolist()
        assert found == whole[len(prompt) :]


def test_the_program_in_plain_torch_writes_what_plain_decoding_writes() -> None:
    names = runpy.run_path(str(ROOT_OF_PROJECT / "examples" / "own_loop_torch.py"))
    tokens = names["tokens"][:4]
    reading: Any = names["read"].__globals__
    reading["cache"] = torch.empty(2, 0, 32)
    while len(tokens) < 100:
        start = reading["cache"].shape[1]
        rows = np.array(tokens[start:])
        seen = np.tri(len(tokens), dtype=bool)[start:]
        logits = names["read"](rows, np.arange(start, len(tokens)), seen)
        tokens.append(int(logits[-1].argmax()))
    assert names["tokens"][:100] == tokens
    assert names["num_passes"] < 40
