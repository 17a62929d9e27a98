"""Drafts that a model drew, and how probable each short output is."""

import numpy as np
from transformers import PreTrainedModel

from decoder.drafters.draft_model import DraftModel, ModelReader
from decoder.drafters.drawing import DrawnFusion, Draws
from decoder.drafters.recycling import RecycledLogits
from retriever.drafter import Drafter
from tests.decoder.decoding import ScriptedDrafter, oracle
from tests.decoder.drafters.draft_models import FREE, distribution
from tests.decoder.drafters.drafted_chains import LIMITS

TOP_K = 3


def drawn_from(
    model: PreTrainedModel, retrieved: list[int], draws: Draws, *, recycles: bool = True
) -> Drafter:
    return DrawnFusion(
        [ScriptedDrafter(oracle(retrieved, num_nodes=6))],
        LIMITS,
        readers=[ModelReader(DraftModel(model))],
        draws=draws,
        recycled=RecycledLogits(1 << 8) if recycles else None,
        costs=FREE,
    )


def shares_of_outputs(target: PreTrainedModel, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Return how probable each output of three tokens is, drawn from the likeliest ones."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for path, above in found.items():
            row = distribution(target, [*prompt, *path])
            likely = np.argsort(-row)[:TOP_K].tolist()
            longer |= {(*path, token): above * row[token] / row[likely].sum() for token in likely}
        found = longer
    return found
