"""Whatever a disk makes of an index: drafts, or one clear error; never a crash."""

import json
from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, build_from_tokens
from indexer.reader import Vocabulary
from tests.retriever.warm_interpreter import run
from tests.suite_parts import cases

ROOT = Path(__file__).parents[3]
NUM_WORDS = 40

# Damages an index and drafts from it, in every way that indexes are read.
DRAFTING = """
import json, random, sys
from pathlib import Path
import numpy as np
from indexer.errors import IndexerError
from indexer.reader import Index
from retriever.drafter import DraftRequest
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.predict.draft import Predictor
from tests.indexer.format.damages import damages

path, other, flips, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rng = np.random.default_rng(seed)
predictor = Predictor(64)
counts = {"drafted": 0, "refused": 0, "nodes": 0}

def draft(indexes):
    size = indexes[0].vocabulary.size
    drafter = EmbeddedDrafter(indexes, predictor=predictor)
    tokens = indexes[0].segments[0].tokens
    for _ in range(3):
        start = int(rng.integers(len(tokens) - 12))
        context = np.minimum(tokens[start : start + 12], size - 1).astype(np.int32)
        drafter.open("s", context)
        (tree,) = drafter.draft([DraftRequest("s", context[:0], 12, 32)])
        assert all(0 <= token < size for token in tree.token_ids.tolist()), tree
        counts["nodes"] += len(tree)
        drafter.close("s", tree.token_ids[:4])
        drafter.draft_context(rng.integers(0, size, 6), 16)

for what in damages(path, other, flips, seed):
    try:
        with Index.open(path) as index, Index.open(other) as sound:
            draft([index])
            draft([index, sound])
            for number, segment in enumerate(index.segments):
                index.document_at(number, int(rng.integers(len(segment.tokens))))
            list(index.documents())
        counts["drafted"] += 1
    except IndexerError:
        counts["refused"] += 1
    except BaseException:
        print(what, file=sys.stderr)
        raise
print(json.dumps(counts))
"""


def build(path: Path, seed: int) -> None:
    """Index text that repeats, so that drafts come of it; of sizes that depend on no seed."""
    rng = np.random.default_rng(seed)
    phrases = rng.integers(0, NUM_WORDS, (8, 12))
    documents = [
        (f"{seed}/{i}", np.concatenate([phrases[(i + j * (1 + i % 3)) % 8] for j in range(6)]))
        for i in range(20)
    ]
    options = BuildOptions(segment_tokens=750)
    build_from_tokens(documents, path, Vocabulary(NUM_WORDS, "aa"), options)


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(1, 1 + cases(1, of=2)))
def test_no_damage_crashes_who_drafts(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.stages.segments.MIN_KEYED_SUFFIXES", 1)
    for number in (1, 2):
        build(tmp_path / str(number), number)
    arguments = (tmp_path / "1", tmp_path / "2", cases(1, of=10), seed)
    done = run("-c", DRAFTING, *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert min(counts["drafted"], counts["refused"]) > 100
    assert counts["nodes"] > 1000
