"""Files of random words, edits of them, and the rows that are found in them."""

import numpy as np

from retriever.kernels.layout import Scratch
from tests.retriever.kernels.twins.row_twins import Row


def rows_in(scratch: Scratch, first: int, end: int) -> list[tuple[int, Row]]:
    """Rows with their places."""
    found = []
    for index in range(first, end):
        row = scratch.rows[index]
        tokens = tuple(scratch.continuations[index, : row["length"]].tolist())
        match, count, source = int(row["match"]), float(row["count"]), int(row["source"])
        written = Row(tokens, match, count, source, similarity=float(row["similarity"]))
        found.append((int(row["position"]), written))
    return found


NEWLINE = 0
NUM_WORDS = 60
NUM_FILES = 20
AHEAD = 6
EDITS = {
    "one token replaced": (1, [901]),
    "three tokens inserted": (0, [901, 902, 903]),
    "five tokens left out": (5, []),
    "a line replaced by two": (None, [901, 902, 903, 904, NEWLINE, 905, 906, 907, NEWLINE]),
}


def random_file(rng: np.random.Generator) -> list[int]:
    """Some 300 tokens in lines of 6 to 13; a few words are frequent and many are rare."""
    shares = 1 / np.arange(1, NUM_WORDS + 1)
    lines = [
        [*(rng.choice(NUM_WORDS, int(rng.integers(5, 13)), p=shares / shares.sum()) + 1), NEWLINE]
        for _ in range(32)
    ]
    return [int(token) for line in lines for token in line]


def edited(rng: np.random.Generator, file: list[int], edit: str) -> tuple[list[int], list[int]]:
    """The file up to the end of an edit, and what follows there in the old file."""
    num_old, new = EDITS[edit]
    begin = int(rng.integers(100, 200))
    if num_old is None:
        begin = file.index(NEWLINE, begin) + 1
        num_old = file.index(NEWLINE, begin) + 1 - begin
    return file[:begin] + new, file[begin + num_old :]
