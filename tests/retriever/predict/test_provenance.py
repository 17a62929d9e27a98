"""Explained drafts: what is named is really there, in the texts that were indexed."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from indexer.build import BuildOptions, build_from_texts, build_from_tokens
from indexer.reader import Document, Index, Vocabulary
from retriever.client.strict import RemoteDrafter
from retriever.commands import app
from retriever.commands.explain_command import paths_of, shown_paths
from retriever.errors import InvalidRequestError, LimitExceededError, VocabularyMismatchError
from retriever.predict.phrases import ListedPhrases
from retriever.predict.provenance import find_ngram
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.explaining import explain
from retriever.tree import ROOT, DocumentOccurrence, DraftTree, Explanation, NodeProvenance, Source
from tests.retriever.conftest import VOCABULARY_SIZE, start_service, stop_service
from tests.suite_parts import cases

BEGINNING = [1, 2, 3, 4, 5, 6]
LICENCES = {"poem": "CC0-1.0", "novel": "MIT", "letter": ""}
TEXTS = {
    "poem": [9, *BEGINNING, 20, 21, 22],
    "novel": [*range(30, 45), *BEGINNING, 20, 21, 23],
    "letter": [7, 7, 7, 7],
}


@dataclass
class Told:
    """One node with what was told of it.

    Attributes:
        source: of the node.
        text: the context and the path to the node, its own token last.
        depth: of the node.
        provenance: what was told.
    """

    source: Source
    text: list[int]
    depth: int
    provenance: NodeProvenance

    @property
    def ngram(self) -> list[int]:
        return self.text[-self.provenance.match_length - 1 :]


def told(explanation: Explanation, context: list[int]) -> Iterator[Told]:
    tree, depths = explanation.tree, explanation.tree.depths()
    assert len(tree) == len(explanation.nodes)
    for node, provenance in enumerate(explanation.nodes):
        path = tree.token_ids[tree.path_to(node)].tolist()
        source = Source(int(tree.sources[node]))
        yield Told(source, [*context, *path], int(depths[node]), provenance)


def num_occurrences(texts: list[list[int]], ngram: list[int]) -> int:
    return sum(
        text[at : at + len(ngram)] == ngram
        for text in texts
        for at in range(len(text) - len(ngram) + 1)
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, vocabulary: Vocabulary) -> tuple[Path, Path]:
    """Two indexes: one of the poem and the letter, one of the novel."""
    folder = tmp_path_factory.mktemp("library")
    for name, documents in (("short", ("poem", "letter")), ("long", ("novel",))):
        build_from_tokens([(each, TEXTS[each]) for each in documents], folder / name, vocabulary)
    return folder / "short", folder / "long"


@pytest.fixture
def licensed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents as if their licences had been known when they were indexed."""
    document_at = Index.document_at

    def with_licence(index: Index, segment: int, position: int) -> Document:
        document = document_at(index, segment, position)
        return replace(document, licence=LICENCES[document.name])

    monkeypatch.setattr(Index, "document_at", with_licence)


@pytest.mark.usefixtures("licensed")
def test_planted_documents_are_named_with_licence_and_place(library: tuple[Path, Path]) -> None:
    drafter = EmbeddedDrafter.open_indexes(library)
    explanation = explain(drafter, [8, *BEGINNING], 4)
    assert explanation.tree.token_ids[:2].tolist() == [20, 21]
    for node, (first, second) in enumerate([(7, 21), (8, 22)]):
        provenance = explanation.nodes[node]
        assert (provenance.match_length, provenance.count) == (6 + node, 2)
        assert [(d.index, d.name, d.licence, d.position) for d in provenance.documents] == [
            ("short", "poem", "CC0-1.0", first),
            ("long", "novel", "MIT", second),
        ]
    last = {t.text[-1]: t.provenance for t in told(explanation, [8, *BEGINNING]) if t.depth == 3}
    assert [d.name for d in last[22].documents] == ["poem"]
    assert [d.name for d in last[23].documents] == ["novel"]
    (only,) = explain(drafter, [8, *BEGINNING], 1, max_documents=1).nodes
    assert (only.count, len(only.documents)) == (2, 1)
    assert explain(drafter, [8, *BEGINNING], 1, max_documents=0).nodes[0].documents == ()


def check(explanation: Explanation, context: list[int], documents: dict[str, list[int]]) -> None:
    """Hold what was told of a draft against the texts."""
    texts = list(documents.values())
    for each in told(explanation, context):
        provenance, match = each.provenance, each.provenance.match_length
        assert provenance.count > 0
        if each.source in (Source.CORPUS, Source.PHRASES):
            assert provenance.count == num_occurrences(texts, each.ngram)
            assert len(provenance.documents) == len({d.name for d in provenance.documents}) > 0
            for place in provenance.documents:
                text = documents[place.name]
                assert text[place.position - match : place.position + 1] == each.ngram
        if each.source == Source.CORPUS and match < min(len(each.text) - 1, 32):
            assert num_occurrences(texts, each.text[-match - 2 :]) == 0
        if each.source == Source.CONTEXT:
            assert len(provenance.context_positions) > 0
            for position in provenance.context_positions:
                assert context[position] == each.text[-1]
                if each.depth == 1:
                    assert context[position - match : position + 1] == each.ngram
        else:
            assert provenance.context_positions == ()


words = st.lists(st.integers(0, 5), min_size=0, max_size=25)


@settings(max_examples=cases(15, of=60), deadline=None)
@given(
    texts=st.lists(words, min_size=1, max_size=12).filter(any),
    context=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    cut=st.integers(0, 12),
    split=st.integers(1, 60),
)
def test_every_document_holds_match_and_token_where_it_says(
    texts: list[list[int]], context: list[int], cut: int, split: int
) -> None:
    documents = {f"text-{number}": text for number, text in enumerate(texts) if text}
    vocabulary = Vocabulary(6, "ab" * 32)
    parts = [list(documents.items())[:cut], list(documents.items())[cut:]]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number, part in enumerate(parts) if part]
        for path, part in zip(paths, filter(None, parts), strict=True):
            options = BuildOptions(segment_tokens=split, keep_duplicates=True)
            build_from_tokens(part, path, vocabulary, options)
        drafter = EmbeddedDrafter.open_indexes(paths)
        explanation = explain(drafter, context, 40, max_documents=4)
        check(explanation, context, documents)
        for index in drafter.stats().indexes:
            for segment in index.segments:
                tokens = segment.tokens.tolist()
                for ngram in ([0], [1, 2], context[-3:], [5, 5, 5, 5], [6], [0] * 40):
                    found = sorted(find_ngram(segment, ngram).tolist())
                    ends = range(len(tokens) - len(ngram) + 1)
                    assert found == [at for at in ends if tokens[at : at + len(ngram)] == ngram]
        drafter.shut_down()


def test_recent_outputs_are_counted_and_not_shown() -> None:
    drafter = EmbeddedDrafter()
    outputs = [[1, 2, 3, 4, 5, 6, 7], [9, 2, 3, 4, 5, 6, 8], [2, 3, 4, 5, 6, 7]]
    for output in outputs:
        drafter.remember(output)
    explanation = explain(drafter, [3, 4, 5], 12)
    seen = set()
    for each in told(explanation, [3, 4, 5]):
        if each.source == Source.GENERATIONS:
            assert each.provenance.count == num_occurrences(outputs, each.ngram)
            assert not each.provenance.documents
            assert not each.provenance.context_positions
            seen.add(each.text[-1])
    assert {6, 7} <= seen
    (first, *_) = told(explain(drafter, [2, 3, 4, 5, 6], 1), [2, 3, 4, 5, 6])
    assert (first.text[-1], first.ngram, first.provenance.count) == (7, [2, 3, 4, 5, 6, 7], 2)


def test_outputs_of_another_tenant_are_neither_shown_nor_counted() -> None:
    drafter = EmbeddedDrafter()
    drafter.remember([1, 2, 3, 4, 5, 6, 7], tenant="a")
    assert len(explain(drafter, [2, 3, 4, 5], 8, tenant="a").tree) > 0
    assert len(explain(drafter, [2, 3, 4, 5], 8, tenant="b").tree) == 0
    drafter.remember([2, 3, 4, 5, 6], tenant="b")
    explanation = explain(drafter, [2, 3, 4, 5], 8, tenant="b")
    assert explanation.tree.token_ids.tolist() == [6]
    assert explanation.nodes[0].count == 1


def test_listed_phrases_are_in_no_document(library: tuple[Path, Path]) -> None:
    phrases = ListedPhrases([(11, 12, 13, 14)])
    drafter = EmbeddedDrafter.open_indexes(library, phrases=phrases)
    explanation = explain(drafter, [11, 12], 2)
    assert explanation.tree.sources.tolist() == [Source.PHRASES] * 2
    assert explanation.nodes == (NodeProvenance(2, 1), NodeProvenance(3, 1))


def test_explained_is_what_is_drafted(index: Path) -> None:
    drafter = EmbeddedDrafter.open_indexes([index])
    context = drafter.stats().indexes[0].segments[0].tokens[:9].astype(np.int32)
    explanation, tree = explain(drafter, context, 30), drafter.draft_context(context, 30)
    assert explanation.tree.token_ids.tolist() == tree.token_ids.tolist()
    assert explanation.tree.probabilities.tolist() == tree.probabilities.tolist()
    assert explain(drafter, [], 30).nodes == ()
    assert explain(drafter, context, 0).nodes == ()


def test_service_explains_as_the_embedded_drafter(library: tuple[Path, Path], index: Path) -> None:
    paths = [*library, index]
    process, address = start_service(
        *(part for path in paths for part in ("--index", str(path))), "--address", "127.0.0.1:0"
    )
    embedded = EmbeddedDrafter.open_indexes(paths)
    with RemoteDrafter(address) as remote:
        for context in ([8, *BEGINNING], [7, 7], [3], list(range(10)) * 2):
            one, other = remote.explain(context, 40, 0.001), explain(embedded, context, 40, 0.001)
            assert one.nodes == other.nodes
            assert one.tree.token_ids.tolist() == other.tree.token_ids.tolist()
            assert len(one.nodes) > 0
        assert remote.explain([1], 0).nodes == ()
        ids, places = ("--context-ids", "8,1,2,3,4,5,6", "--json"), []
        for at in (("--server", address), [part for path in paths for part in ("--index", path)]):
            result = run(*at, *ids)
            assert result.exit_code == 0, result.output
            places.append([node["documents"] for node in json.loads(result.stdout)])
        assert places[0] == places[1]
        assert "exclude each other" in run("--server", address, "--index", paths[0], *ids).output
        with pytest.raises(LimitExceededError, match="MAX_DOCUMENTS"):
            remote.explain([1], 4, max_documents=65)
        with pytest.raises(LimitExceededError, match="max_budget_nodes"):
            remote.explain([1], 4000)
        for wrong, budget, documents in (([50], 4, 1), ([1], -1, 1), ([1], 4, -1), ([-1], 4, 1)):
            with pytest.raises(InvalidRequestError):
                remote.explain(wrong, budget, max_documents=documents)
    with (
        RemoteDrafter(address, vocabulary_fingerprint="cd" * 32) as stranger,
        pytest.raises(VocabularyMismatchError),
    ):
        stranger.explain([1], 4)
    stop_service(process)


def test_embedded_refuses_numbers_that_cannot_be() -> None:
    drafter = EmbeddedDrafter()
    with pytest.raises(InvalidRequestError, match="negative"):
        explain(drafter, [1], 4, max_documents=-1)
    with pytest.raises(LimitExceededError):
        explain(drafter, [1], 4, max_documents=65)
    with pytest.raises(LimitExceededError):
        explain(drafter, [1], 4000)


@pytest.mark.seeds
@pytest.mark.parametrize("name", ["tokens", "suffixes"])
def test_damage_misleads_but_does_not_crash(
    tmp_path: Path, vocabulary: Vocabulary, name: str
) -> None:
    rng = np.random.default_rng(5)
    texts = [(f"{i}", rng.integers(0, VOCABULARY_SIZE, 60).tolist()) for i in range(20)]
    path = tmp_path / "index"
    build_from_tokens(texts, path, vocabulary)
    (file,) = path.glob(f"segments/*/{name}")
    whole = file.read_bytes()
    for _ in range(cases(3, of=10)):
        file.write_bytes(rng.bytes(len(whole)))
        drafter = EmbeddedDrafter.open_indexes([path])
        for _, text in texts:
            explanation = explain(drafter, text[:30], 40)
            for node in explanation.nodes:
                assert node.count >= 0
        drafter.shut_down()


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


@pytest.mark.usefixtures("licensed")
def test_command_prints_json_and_trees(library: tuple[Path, Path]) -> None:
    indexes = [part for path in library for part in ("--index", path)]
    result = run(*indexes, "--context-ids", "8,1,2, 3,4,5,6", "--budget", 4, "--json")
    assert result.exit_code == 0, result.output
    nodes = json.loads(result.stdout)
    assert [node["token_id"] for node in nodes[:2]] == [20, 21]
    assert nodes[0]["source"] == "corpus"
    assert nodes[0]["documents"][0] == {
        "index": "short", "name": "poem", "licence": "CC0-1.0", "position": 7,
    }  # fmt: skip
    assert nodes[1]["parent"] == 0
    shown = run(*indexes, "--context-ids", "8,1,2,3,4,5,6", "--budget", 4, "--full").stdout
    assert "token 20" in shown
    assert "short: poem, CC0-1.0, token 7" in shown
    assert "2 x after a match of 6" in shown


def test_command_shows_the_text_of_tokens(tmp_path: Path) -> None:
    """With a tokenizer of the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = {"fox": "the quick brown fox", "cat": "a cat that sleeps"}
    build_from_texts(texts.items(), tmp_path / "index", str(tmp_path / "tokenizer"))
    (tmp_path / "context.txt").write_text("the qu")
    options = ("--index", tmp_path / "index", "--budget", 2)  # which knows its tokenizer
    result = run(*options, "--context-file", tmp_path / "context.txt", "--json")
    assert result.exit_code == 0, result.output
    nodes = json.loads(result.stdout)
    assert [node["text"] for node in nodes] == ["i", "c"]
    assert [node["documents"][0]["name"] for node in nodes] == ["fox", "fox"]
    assert "'i'" in run(*options, "--context", "the qu", "--full").stdout
    shown = run(*options, "--context", "the qu").stdout.splitlines()
    assert shown[0] == "nodes: 2, paths: 1, most expected tokens first"
    assert shown[2].endswith("  'ic'")
    assert shown[3:5] == ["        corpus 2 [1]", "[1] index: fox"]
    (tmp_path / "guess.txt").write_text("xylophone")
    guessed = (*options, "--budget", 24, "--context", "the qu", "--prediction")
    assert "] prediction: guess.txt\n" in run(*guessed, tmp_path / "guess.txt").stdout
    shown_whole = run(*guessed, tmp_path / "guess.txt", "--full").stdout
    assert "prediction: guess.txt, token 0" in shown_whole
    assert "prediction: guess.txt, token 1" in shown_whole
    assert "nowhere cannot be read" in run(*guessed, tmp_path / "nowhere").stderr
    (tmp_path / "tokenizer").rename(tmp_path / "elsewhere")
    missing = run(*options, "--context", "the qu")
    assert missing.exit_code == 1
    said = " ".join(missing.stderr.split())
    assert f"the index was built with the tokenizer '{tmp_path}/tokenizer', which is not" in said
    assert "name the same tokenizer with --tokenizer" in said
    by_hand = run(*options, "--context", "the qu", "--tokenizer", tmp_path / "elsewhere")
    assert by_hand.stdout.splitlines() == shown


def test_the_paths_that_bring_most_tokens_come_first_and_each_source_once() -> None:
    tree = DraftTree.checked(
        [5, 6, 7, 8], [ROOT, 0, ROOT, 1], [0.5, 0.45, 0.4, 0.1], [int(Source.CORPUS)] * 4
    )
    assert [path.nodes for path in paths_of(tree)] == [[0, 1, 3], [2]]
    assert paths_of(tree)[0].expected == pytest.approx(1.05)
    document = DocumentOccurrence("my", "a.py", "MIT", 3)
    nodes = tuple(NodeProvenance(1, 2, (), (document,)) for _ in range(4))
    lines = shown_paths(Explanation(tree, nodes), None)
    assert lines[:-1] == [
        "nodes: 4, paths: 2, most expected tokens first",
        "first the probability that a path is accepted; below, its tokens by database",
        " 0.100  tokens 5, 6, 8",
        "        corpus 3 [1]",
        " 0.400  tokens 7",
        "        corpus 1 [1]",
        "[1] my: a.py, MIT",
    ]
    assert shown_paths(Explanation(DraftTree.empty(), ()), None)[0].startswith("no draft")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of"),
        (("--context", "a", "--context-ids", "1"), "give one of"),
        (("--context-ids", "1,x"), "takes numbers"),
        (("--context-ids", "-1"), "-1 is not a token id"),
        (("--context-file", "nowhere"), "nowhere cannot be read"),
        (("--context-ids", "1", "--index", "nowhere"), "no index"),
        (("--context", "\udcff"), "not UTF-8"),
    ],
)
def test_command_refuses_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_match_is_as_long_as_the_tokens_agree() -> None:
    """Beyond the 32 tokens that the search looks at, and where what is offered was edited."""
    drafter = EmbeddedDrafter()
    rng = np.random.default_rng(3)
    num_places = num_long = 0
    for round_ in range(60):
        tokens = rng.integers(0, int(rng.integers(2, 40)), int(rng.integers(5, 150))).tolist()
        context = [*tokens, *rng.integers(50, 60, 3).tolist(), *tokens[: 2 * round_]]
        for each in told(explain(drafter, context, 12), context):
            places = each.provenance.context_positions
            if each.source is not Source.CONTEXT or not places:
                continue
            before = each.text[:-1]
            agreements = []
            for place in places:
                assert context[place] == each.text[-1]
                agreed = 0
                while agreed < place and before[-1 - agreed] == context[place - 1 - agreed]:
                    agreed += 1
                agreements.append(agreed)
            assert each.provenance.match_length == max(agreements)
            num_places += len(places)
            num_long += max(agreements) > 40
    assert num_places > 100
    assert num_long > 20
    drafter.shut_down()
