"""Traces made up for tests: like those of a model that copies much, without running one."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from decoder.plugins.trace.trace import TracedStep, TracedTree
from decoder.plugins.trace.viewer.traced_documents import TracedEvidence
from retriever.tree import ROOT, DocumentOccurrence

SOURCES = ("context", "generations", "phrases", "corpus", "model")
LICENCES = ("Apache-2.0", "MIT", "")
WORDS = (
    "def",
    "return",
    "self",
    "value",
    "index",
    "of",
    "a",
    "tree",
    "draft",
    "node",
    "token",
    "if",
)


@dataclass(slots=True)
class _Growing:
    """A tree on its way, most probable node first."""

    words: list[str] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, word: str, parent: int, share: float, source: str) -> int:
        above = 1.0 if parent == ROOT else self.probabilities[parent]
        self.words.append(word)
        self.parents.append(parent)
        self.probabilities.append(min(above * share, *self.probabilities, 1.0))
        self.sources.append(source)
        return len(self.words) - 1


def made_steps(num_tokens: int, *, seed: int = 0, words: Sequence[str] = WORDS) -> list[TracedStep]:
    """Return the passes of one prompt that committed so many tokens."""
    drawn = random.Random(seed)
    steps: list[TracedStep] = []
    left = num_tokens
    for number, (tree, num_kept, accepted) in enumerate(_trees(drawn, words), 1):
        path = accepted[: left - 1]
        pieces = [tree.words[node] for node in path] + [_word(drawn, words)]
        left -= len(pieces)
        steps.append(
            TracedStep(
                prompt=1,
                step=number,
                tree=TracedTree(
                    [len(word) for word in tree.words],
                    tree.words,
                    tree.parents,
                    [round(p, 4) for p in tree.probabilities],
                    tree.sources,
                ),
                num_kept=num_kept,
                path=path,
                tokens=[len(piece) for piece in pieces],
                text="".join(pieces),
                draft_us=round(drawn.uniform(40, 200), 1),
                target_us=round(drawn.uniform(20_000, 40_000), 1),
                host_us=round(drawn.uniform(50, 150), 1),
                pieces=pieces,
                evidence=[
                    _evidence(drawn, node) for node in path if tree.sources[node] == "corpus"
                ],
                prompt_text="Write a function that walks a tree." if number == 1 else "",
            )
        )
        if left == 0:
            return steps
    raise AssertionError("passes do not end")


def _trees(drawn: random.Random, words: Sequence[str]) -> Iterator[tuple[_Growing, int, list[int]]]:
    yield _Growing(), 0, []  # the prompt's own pass
    while True:
        tree, source = _Growing(), drawn.choice(SOURCES)
        end, spine = ROOT, []
        for _ in range(drawn.choice((0, 2, 5, 9))):
            source = source if drawn.random() < 0.8 else drawn.choice(SOURCES)
            end = tree.add(_word(drawn, words), end, drawn.uniform(0.7, 0.99), source)
            spine.append(end)
        for _ in range(len(spine)):
            parent = drawn.choice((ROOT, *spine))
            tree.add(_word(drawn, words), parent, drawn.uniform(0.01, 0.3), drawn.choice(SOURCES))
        num_kept = drawn.randint(0, len(tree.words))
        yield tree, num_kept, spine[: drawn.randint(0, min(num_kept, len(spine)))]


def _word(drawn: random.Random, words: Sequence[str]) -> str:
    return "\n" if drawn.random() < 0.04 else " " + drawn.choice(words)


def _evidence(drawn: random.Random, node: int) -> TracedEvidence:
    number = drawn.randint(1, 4)
    licence = drawn.choice(LICENCES)
    place = DocumentOccurrence("library", f"src/part_{number}.py", licence, drawn.randint(0, 9000))
    return TracedEvidence(node, drawn.randint(1, 16), drawn.randint(1, 40), [place])
