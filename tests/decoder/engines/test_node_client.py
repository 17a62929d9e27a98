"""A client in another language, made from the .proto alone, gets the drafts that Python gets."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retriever.drafter import DraftRequest
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.retriever.conftest import index, service, vocabulary  # noqa: F401  fixtures

ROOT = Path(__file__).parents[3]
BUDGET = 16
RECURRING = [3, 9, 4, 40, 12, 7, 21, 22, 3, 9]
NETWORK_ERRORS = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH")

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its libraries, in a folder of its own."""
    folder = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(
        ROOT / "examples" / "node", folder, ignore=shutil.ignore_patterns("node_modules")
    )
    done = subprocess.run(
        ["npm", "install", "--prefer-offline", "--no-audit", "--no-fund", "--no-package-lock"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if any(code in done.stderr for code in NETWORK_ERRORS):
        pytest.skip("npm reaches no registry")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def twin(index: Path) -> Iterator[EmbeddedDrafter]:  # noqa: F811  pytest's way
    drafter = EmbeddedDrafter.open_indexes([index])
    yield drafter
    drafter.shut_down()


def answers_of(folder: Path, address: str, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["node", "draft.js", address, str(ROOT / "proto")],
        cwd=folder,
        input="\n".join(map(json.dumps, steps)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_same(answer: dict[str, Any], tree: DraftTree) -> None:
    assert answer["token_ids"] == tree.token_ids.tolist()
    assert answer["parents"] == tree.parents.tolist()
    assert np.array(answer["probabilities"], np.float32).tolist() == tree.probabilities.tolist()
    assert len(answer["sources"]) == len(tree)


def step(session: str, *new_tokens: int) -> dict[str, Any]:
    return {"draft": session, "new_tokens": new_tokens, "budget_nodes": BUDGET}


def test_sessions_of_two_sequences_draft_token_for_token_alike(
    installed: Path,
    service: str,  # noqa: F811
    twin: EmbeddedDrafter,
) -> None:
    steps: list[dict[str, Any]] = [
        {"open": "a", "prompt": [1, 2, 3]},
        {"open": "b", "prompt": RECURRING},
    ]
    for token in (4, 40, 12, 7):
        steps += [step("a", token, token + 1), step("b", token)]
    steps.append(step("a", 9) | {"budget_nodes": 0})  # none, not the service's default
    steps += [{"close": "a", "new_tokens": [5]}, {"open": "c", "prompt": [4]}, step("c", 5, 40)]
    answers = answers_of(installed, service, steps)
    assert len(answers) == len(steps)
    num_nodes = 0
    lengths: dict[str, int] = {}
    for asked, answer in zip(steps, answers, strict=True):
        if "open" in asked:
            twin.open(asked["open"], asked["prompt"])
            lengths[asked["open"]] = len(asked["prompt"])
        elif "close" in asked:
            twin.close(asked["close"], asked["new_tokens"])
        else:
            name, new = asked["draft"], np.array(asked["new_tokens"], np.int32)
            lengths[name] += len(new)
            budget = asked["budget_nodes"]
            [tree] = twin.draft([DraftRequest(name, new, lengths[name], budget)])
            assert_same(answer, tree)
            num_nodes += len(tree)
    assert num_nodes > BUDGET


def test_bare_contexts_draft_alike_and_refusals_are_told(
    installed: Path,
    service: str,  # noqa: F811
    twin: EmbeddedDrafter,
) -> None:
    refused = {"open": "other", "prompt": [1], "fingerprint": "cd" * 32}
    answers = answers_of(
        installed,
        service,
        [
            {"context": RECURRING, "budget_nodes": BUDGET},
            refused,
            step("other", 2),
            {"open": "wrong", "prompt": [1]},
            step("wrong", 1_000_000),
        ],
    )
    assert_same(answers[0], twin.draft_context(RECURRING, BUDGET))
    assert answers[2]["refused"] == 9  # FAILED_PRECONDITION
    assert "fingerprint" in answers[2]["message"]
    assert answers[4]["refused"] == 3  # INVALID_ARGUMENT
