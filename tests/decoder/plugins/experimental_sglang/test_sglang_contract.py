"""Against the installed engine's own classes and kernels."""

import inspect
import os
import subprocess
import sys
from array import array
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decoder.engines.engine_sequences import EngineSequences
from decoder.plugins.experimental_sglang.corpus import DrafterCorpus, lay_out, masks_of
from retriever.client.local import LocalDrafter
from tests.decoder.plugins.experimental_sglang.conftest import Kernels
from tests.decoder.plugins.experimental_sglang.rows import greedy_path, random_tree, row_of
from tests.decoder.plugins.experimental_sglang.sglang_decoding import (
    Request,
    chosen,
    committed,
    plain,
)
from tests.decoder.plugins.experimental_sglang.tree_verification import links_of, verify_greedy

WIDTH = 6


@pytest.fixture(scope="module")
def corpus_class(sglang_folder: object) -> Any:
    assert sglang_folder
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus  # noqa: PLC0415

    return NgramCorpus


def own_corpus(width: int = WIDTH) -> DrafterCorpus:
    return DrafterCorpus(EngineSequences(LocalDrafter()), width)


def test_twin_of_the_kernels_is_true(kernels: Kernels) -> None:
    random = np.random.default_rng(11)
    for _ in range(500):
        tokens, mask = row_of(random_tree(random, 11, 4), 0, 12)
        links = links_of(mask)
        assert [each.tolist() for each in kernels.links_of(mask)] == [
            each.tolist() for each in links
        ]
        target = random.integers(0, 4, 12)
        assert kernels.verify(tokens, links, target) == verify_greedy(tokens, links, target)


def test_the_engines_verification_accepts_our_trees_whole_and_padding_never(
    kernels: Kernels,
) -> None:
    random = np.random.default_rng(7)
    for _ in range(25):
        tree = random_tree(random, 4, 3)
        tokens, mask = row_of(tree, 0, 5)
        links = kernels.links_of(mask)
        for target in product(range(3), repeat=5):
            accepted = kernels.verify(tokens, links, np.array(target))
            assert accepted == greedy_path(tree, np.array(target))


def test_host_links_of_the_engine_are_those_of_its_kernel(
    ngram_worker: Any, kernels: Kernels
) -> None:
    random = np.random.default_rng(5)
    trees = [random_tree(random, WIDTH - 1, 4) for _ in range(50)]
    _, parents = lay_out(trees, [0] * 50, WIDTH)
    masks = masks_of(parents)
    next_token, next_sibling = ngram_worker._derive_tree_links(masks.reshape(-1), 50, WIDTH)
    for row, mask in enumerate(masks):
        links = kernels.links_of(mask)
        assert next_token[row].tolist() == links.next_token.tolist()
        assert next_sibling[row].tolist() == links.next_sibling.tolist()


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_shapes_and_masks_are_those_of_the_engines_own_corpus(
    corpus_class: Any, kernels: Kernels, width: int, num_rows: int
) -> None:
    asked = ([str(row) for row in range(num_rows)], [[4, 5, 6]] * num_rows, [3] * num_rows)
    results = []
    for corpus in (corpus_class(draft_token_num=width, capacity=1 << 12), own_corpus(width)):
        corpus.batch_put([[4, 5, 6, 7]])
        corpus.synchronize()
        results.append(corpus.batch_get(*asked))
    for tokens, masks in results:
        assert tokens.dtype == masks.dtype == np.int64
        assert (tokens.shape, masks.shape) == ((num_rows * width,), (num_rows * width * width,))
        assert tokens.reshape(num_rows, width)[:, 0].tolist() == [6] * num_rows
        for mask in masks.reshape(num_rows, width, width):
            assert mask.diagonal().tolist() == [1] * width
            assert set(np.unique(np.tril(mask, -1))) <= {0, 1}
            assert not np.triu(mask, 1).any()
            assert kernels.links_of(mask).positions[0] == 0


def test_a_chain_is_masked_as_the_engines_own_corpus_masks_it(corpus_class: Any) -> None:
    text = [1, 2, 3, 4, 5, 6]
    theirs = corpus_class(draft_token_num=4, capacity=1 << 12)
    theirs.batch_put([text])
    theirs.synchronize()
    ours = own_corpus(4)
    ours.show([Request("a", array("q", [*text, 1, 2]))])
    results = [
        corpus.batch_get(["a"], [[*text, 1, 2]], [len(text) + 2]) for corpus in (theirs, ours)
    ]
    assert results[0][0].tolist() == results[1][0].tolist() == [2, 3, 4, 5]
    assert results[0][1].tolist() == results[1][1].tolist()


def test_all_that_the_worker_calls_is_there(ngram_worker: Any, corpus_class: Any) -> None:
    source = inspect.getsource(ngram_worker.NGRAMWorker)
    used = {piece.split("(")[0] for piece in source.split("self.ngram_corpus.")[1:]}
    assert {"batch_get", "batch_put", "synchronize", "erase_match_state", "reset"} <= used
    for name in used:
        ours, theirs = (
            inspect.signature(getattr(each, name)) for each in (DrafterCorpus, corpus_class)
        )
        assert len(ours.parameters) == len(theirs.parameters), name


def test_our_algorithm_answers_as_ngram_does(plugin: Any) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: PLC0415

    ours = SpeculativeAlgorithm.from_string("foredraft")
    asked = [
        name
        for name in vars(SpeculativeAlgorithm)
        if name.startswith(("is_", "supports_", "has_", "need_", "carries_"))
    ]
    assert len(asked) > 10
    for name in asked:
        assert getattr(ours, name)() == getattr(SpeculativeAlgorithm.NGRAM, name)(), name
    assert issubclass(plugin.worker_class(None), sys.modules[NGRAM].NGRAMWorker)


NGRAM = "sglang.srt.speculative.ngram_worker"


def resolved(algorithm: str, given: dict[str, Any]) -> dict[str, Any]:
    """What SGLang makes of its arguments where it comes to an algorithm."""
    from sglang.srt.arg_groups.overrides import resolved_view  # noqa: PLC0415
    from sglang.srt.arg_groups.speculative_hook import (  # noqa: PLC0415
        handle_speculative_decoding,
    )
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    args = ServerArgs(model_path="none", speculative_algorithm=algorithm, page_size=1, **given)
    handle_speculative_decoding(args)
    view = resolved_view(args)
    names = (
        "max_running_requests",
        "enable_mixed_chunk",
        "disable_overlap_schedule",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
        "speculative_eagle_topk",
    )
    return {name: getattr(view, name) for name in names}


@pytest.mark.parametrize(
    "given",
    [
        {"device": "cuda"},
        {"device": "cpu"},
        {"device": "cuda", "speculative_num_draft_tokens": 32, "max_running_requests": 7},
    ],
)
def test_arguments_are_resolved_as_for_ngram(plugin: Any, given: dict[str, Any]) -> None:
    ours, theirs = (resolved(name, given) for name in (plugin.ALGORITHM, "NGRAM"))
    assert ours == theirs
    assert ours["speculative_num_draft_tokens"] == given.get("speculative_num_draft_tokens", 12)


def test_pipelines_are_refused(plugin: Any) -> None:
    with pytest.raises(ValueError, match="--pp-size 1"):
        resolved(plugin.ALGORITHM, {"device": "cuda", "pp_size": 2})


class FakeTarget:
    """What the worker reads of SGLang's target worker."""

    tokenizer = None

    def __init__(self) -> None:
        config = SimpleNamespace(vocab_size=50)
        self.model_runner = SimpleNamespace(max_running_requests=8, model_config=config)


@pytest.fixture(params=["sync", "overlap"])
def worker(plugin: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our worker, made as SGLang's scheduler makes it, with settings of the kind it has."""
    worker_module = inspect.getmodule(plugin.worker_class(None))
    spec = SimpleNamespace(
        speculative_num_draft_tokens=WIDTH,
        speculative_ngram_max_trie_depth=4,  # fewer than a step may commit
        speculative_eagle_topk=10,
        speculative_num_steps=1,
        speculative_ngram_min_bfs_breadth=1,
        speculative_ngram_max_bfs_breadth=10,
        speculative_ngram_match_type="BFS",
        speculative_ngram_capacity=1 << 10,
        speculative_ngram_external_sam_budget=0,
        speculative_ngram_external_corpus_max_tokens=1000,
        speculative_ngram_external_corpus_path=None,
    )
    schedule = SimpleNamespace(disable_overlap_schedule=request.param == "sync", page_size=1)
    engine = sys.modules[NGRAM]
    monkeypatch.setattr(engine, "get_spec", lambda: spec)
    monkeypatch.setattr(engine, "get_schedule", lambda: schedule)
    monkeypatch.setattr(engine, "get_device", lambda: SimpleNamespace(device="cpu"))
    group = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(worker_module, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    return plugin.worker_class(None)(None, 0, 0, FakeTarget())


class Batch:
    """What the worker reads of SGLang's batch; results come one step late where they overlap."""

    def __init__(self, reqs: Sequence[Request], *, is_late: bool) -> None:
        self.reqs = list(reqs)
        self.is_late = is_late
        self.late: dict[str, list[int]] = {each.rid: [] for each in reqs}
        if is_late:
            for each in reqs:
                self.late[each.rid] = [each.output_ids.pop()]
        self.relay()

    def grammar_needs_sync(self) -> bool:
        return False

    def tokens(self, request: Request) -> list[int]:
        return [*request.tokens, *self.late[request.rid]]

    def commit(self, request: Request, tokens: list[int]) -> None:
        if self.is_late:
            request.output_ids.extend(self.late[request.rid])
            self.late[request.rid] = tokens
        else:
            request.output_ids.extend(tokens)
        self.relay()

    def relay(self) -> None:
        """The tensors that the last step leaves to the next one."""
        import torch  # noqa: PLC0415  (not where the engine is absent)

        rows = [self.late[each.rid] for each in self.reqs]
        padded = [row + [0] * (WIDTH - len(row)) for row in rows]
        self.spec_info = SimpleNamespace(
            accept_tokens=torch.tensor(padded).flatten(),
            accept_lens=torch.tensor([len(row) for row in rows]),
        )


def test_the_engines_worker_decodes_with_our_drafts(worker: Any, kernels: Kernels) -> None:
    is_late = worker.enable_overlap
    everyone = [Request.of(str(seed), [seed, 1, 2, 3, *range(seed * 3)]) for seed in range(4)]
    batch = Batch(everyone, is_late=is_late)
    num_steps = num_rows = 0
    while batch.reqs and num_steps < 200:
        tokens, masks = worker._prepare_draft_tokens(batch)
        rows = tokens.reshape(-1, WIDTH)
        for request, row, mask in zip(
            list(batch.reqs), rows, masks.reshape(-1, WIDTH, WIDTH), strict=True
        ):
            context = batch.tokens(request)
            batch.commit(request, committed(context, row, mask, kernels.verify))
        worker._update_ngram_corpus(batch)
        num_steps, num_rows = num_steps + 1, num_rows + len(rows)
        left = [each for each in batch.reqs if len(each.output_ids) < 100 + 20 * int(each.rid)]
        gone = [each.rid for each in batch.reqs if each not in left]
        if gone:  # as the worker does itself after its forward pass
            worker.ngram_corpus.erase_match_state(gone)
            batch.reqs = left
            batch.relay()
    outputs = [list(request.output_ids) for request in everyone]
    assert outputs == [
        plain(r.origin_input_ids_unpadded, len(o)) for r, o in zip(everyone, outputs, strict=True)
    ]
    assert sum(map(len, outputs)) > 1.5 * num_rows
    assert len(worker.ngram_corpus) == 0
    assert worker.ngram_corpus.num_errors == 0


def test_a_flushed_cache_ends_sessions(worker: Any) -> None:
    batch = Batch([Request.of("a", [1, 2, 3])], is_late=worker.enable_overlap)
    worker._prepare_draft_tokens(batch)
    assert len(worker.ngram_corpus) == 1
    worker.clear_cache_pool()
    assert len(worker.ngram_corpus) == 0


def test_a_corpus_at_startup_is_refused(worker: Any) -> None:
    with pytest.raises(ValueError, match="foredraft's own indexes"):
        worker.add_external_corpus("a", [[1, 2]])
    assert worker.list_external_corpora() == {}


def test_the_entry_point_is_loaded_by_the_engine(sglang_folder: object) -> None:
    """In a process of its own, where nothing is stubbed: what the package's loader finds."""
    assert sglang_folder
    script = (
        "from sglang.srt.plugins import load_plugins_by_group as load\n"
        "for name, (function, _) in load('sglang.srt.plugins').items(): function(); print(name)\n"
        "from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as S\n"
        "print(S.from_string('FOREDRAFT').is_ngram())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SGLANG_PLUGINS": "foredraft"},
    )
    assert done.stdout.split()[-2:] == ["foredraft", "True"], done.stderr


def test_twin_target_repeats_enough_to_be_drafted_for() -> None:
    assert len({chosen(plain([1, 2], n)) for n in range(2, 50)}) > 3
