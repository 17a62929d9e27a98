"""A database is added in a file of its own, and what was learned before it came stays."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retriever.predict.databases import DATABASES, DatabaseKind, register_database
from retriever.predict.weights import (
    Weights,
    from_bytes,
    from_values,
    prior_weights,
    to_bytes,
    values_of,
)
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import MAX_SOURCES, Source, drafted_sources
from tests.retriever.warm_interpreter import run

ROOT = Path(__file__).parents[3]


def learned_weights() -> Weights:
    """Weights all of which have moved."""
    weights = prior_weights()
    values = values_of(weights)
    values += np.linspace(-1, 1, len(values)).astype(np.float32)
    return from_values(values)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program of the registered database prints."""
    kept = tmp_path_factory.mktemp("kept") / "weights"
    kept.write_bytes(to_bytes(learned_weights()))
    done = run("-m", "tests.retriever.predict.counting_database", kept, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_is_registered_before_a_drafter_is_made() -> None:
    EmbeddedDrafter()
    with pytest.raises(ValueError, match="before the first drafter"):
        register_database(DatabaseKind(Source.MODEL, 1.0, open=lambda _: None))


def test_the_example_drafts_from_its_texts() -> None:
    done = run(str(ROOT / "examples" / "known_texts.py"), cwd=ROOT)
    assert done.stdout == "[13, 14, 15] ['known_texts', 'known_texts', 'known_texts']\n"


def test_a_registered_database_is_drafted_from(shown: Any) -> None:
    assert shown["tokens"][:3] == [92, 93, 94]
    assert set(shown["sources"]) == {"counting"}


def test_a_registered_database_is_seen_wherever_databases_are(shown: Any) -> None:
    """In explanations, on the wire, and where a service shows what it drafts from."""
    first = shown["explained"][0]
    assert (first["source"], first["match_length"], first["count"]) == ("counting", 2, 1)
    assert shown["received"] == shown["sources"]
    others = ["context", "generations", "phrases", "corpus", "predictions", "siblings"]
    assert shown["shown"] == [*others, "counting"]
    assert shown["colour"] == "#56b4e9"
    assert shown["counted"] == [4, 2]


def test_weights_from_before_a_database_open_with_all_that_they_learned(shown: Any) -> None:
    weights = learned_weights()
    learned = weights["escape"][0, : len(Source)].ravel().tolist()
    assert shown["known"] == learned
    assert shown["network"] == weights["evidence"].ravel().tolist()


def test_a_new_database_begins_with_what_holds_for_the_others_on_average(shown: Any) -> None:
    np.testing.assert_allclose(shown["default"], 0, atol=1e-6)
    assert shown["kept"]


def test_weights_with_a_source_that_is_not_registered_open_without_it(shown: Any) -> None:
    weights, expected = from_bytes(bytes.fromhex(shown["by_old"])), learned_weights()
    assert np.array_equal(values_of(weights), values_of(expected))


def test_rows_belong_to_the_sources_that_they_name() -> None:
    """Whatever their order, and whichever there are; the others begin as all do."""
    weights, prior = learned_weights(), prior_weights()
    values = values_of(weights)
    network, rows = values[: -35 * len(Source)], values[-35 * len(Source) :].reshape(-1, 35)
    named = b"".join(bytes([len(name)]) + name for name in (b"CORPUS", b"CONTEXT"))
    chosen = rows[[Source.CORPUS, Source.CONTEXT]]
    opened = from_bytes(b"weights3" + bytes([2]) + named + network.tobytes() + chosen.tobytes())
    for source in Source:
        expected = weights if source in {Source.CORPUS, Source.CONTEXT} else prior
        assert np.array_equal(opened["escape"][0, source], expected["escape"][0, source])
    assert np.array_equal(opened["bias"], weights["bias"])


def test_predictions_begin_with_what_holds_for_other_databases_on_average() -> None:
    prior = prior_weights()
    databases = [Source.CONTEXT, Source.GENERATIONS, Source.PHRASES, Source.CORPUS]
    mean = prior["escape"][0, databases].mean(axis=0)
    np.testing.assert_allclose(prior["escape"][0, Source.PREDICTIONS], mean, atol=1e-6)


def test_every_beginning_of_kept_weights_is_refused() -> None:
    kept, prior = to_bytes(learned_weights()), prior_weights()
    for end in [*range(80), len(kept) - 4, len(kept) - 1]:
        assert np.array_equal(from_bytes(kept[:end]), prior)
    assert not np.array_equal(from_bytes(kept), prior)


@pytest.mark.parametrize("size", [0, 1, 400, 10_000])
def test_other_numbers_of_values_are_no_weights(size: int) -> None:
    with pytest.raises(ValueError, match=f"there are {size} weights, and"):
        from_values(np.zeros(size, np.float32))


@pytest.mark.parametrize(
    ("number", "name", "reason"),
    [
        (2, "NEW", "the next one is"),
        (len(Source) + 1, "NEW", "the next one is"),
        (MAX_SOURCES, "NEW", f"{MAX_SOURCES - 1} is the last"),
        (len(Source), "CORPUS", "take another name"),
        (len(Source), "lower", "take another name"),
        (len(Source), "", "take another name"),
    ],
)
def test_sources_that_cannot_be_are_refused(number: int, name: str, reason: str) -> None:
    before = list(Source)
    with pytest.raises(ValueError, match=reason):
        Source.register(number, name)
    assert list(Source) == before


def test_a_source_has_one_database() -> None:
    assert sorted(kind.source for kind in DATABASES) == drafted_sources()
    with pytest.raises(ValueError, match="corpus is registered already"):
        register_database(DatabaseKind(Source.CORPUS, 1.0, lambda _: None))


def test_numbers_of_sources_are_known_below_their_count() -> None:
    assert [Source(number) for number in range(len(Source))] == list(Source)
    for number in (-1, len(Source), 255):
        with pytest.raises(ValueError, match="is not a source"):
            Source(number)
