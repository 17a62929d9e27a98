"""Compiles the kernels that most tests and the processes they start need: `python -m ... LOCK`.

The lock's file is held until all are compiled; a line on stdout says that it is held. Where they
were compiled before, this takes two seconds.
"""

import fcntl
import sys
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def compile_drafting(size: int) -> None:
    """Draft from all databases of a vocabulary of a size."""
    import numpy as np  # noqa: PLC0415  (once the lock is held)

    from indexer.build import build_from_tokens  # noqa: PLC0415
    from indexer.reader import Vocabulary  # noqa: PLC0415
    from retriever.drafter import DraftRequest  # noqa: PLC0415
    from retriever.sessions.cold_start import warm_rare  # noqa: PLC0415
    from retriever.sessions.embedded import EmbeddedDrafter  # noqa: PLC0415

    phrase = list(range(1, 30))
    documents = [(str(number), phrase * 4) for number in range(3)]
    with TemporaryDirectory() as scratch:
        path = Path(scratch, "index")
        build_from_tokens(documents, path, Vocabulary(size, "ab" * 32))
        drafter = EmbeddedDrafter.open_indexes([path])
        drafter.warm()
        warm_rare()
        for name in ("first", "second"):
            drafter.open(name, phrase)
            drafter.draft([DraftRequest(name, np.array([1, 2], np.int32), len(phrase) + 2, 16)])
            drafter.close(name, phrase)
        drafter.draft_context(phrase[:9], 16)
        drafter.shut_down()


def compile_fusion() -> None:
    """Decode with drafts that are fused of all kinds, and asked for ahead of their passes."""
    from decoder.drafters.draft_model import DraftModel, ModelReader  # noqa: PLC0415  (as above)
    from decoder.drafters.drawing import DrawnFusion, Draws  # noqa: PLC0415
    from decoder.drafters.fusion import FusedDrafter  # noqa: PLC0415
    from decoder.drafters.recycling import RecycledLogits  # noqa: PLC0415
    from retriever.follower import DraftLimits  # noqa: PLC0415
    from retriever.sessions.embedded import EmbeddedDrafter  # noqa: PLC0415
    from tests.decoder.decoding import (  # noqa: PLC0415
        VOCABULARY,
        decoded,
        decoder_ahead,
        prompt_of,
        tiny_llama,
    )
    from tests.decoder.drafters.draft_models import FREE  # noqa: PLC0415

    limits, reader = DraftLimits(VOCABULARY, VOCABULARY), ModelReader(DraftModel(tiny_llama()))
    options: dict[str, Any] = {
        "readers": [reader],
        "recycled": RecycledLogits(1 << 10),
        "costs": FREE,
    }
    for drafter in (
        FusedDrafter([EmbeddedDrafter()], limits, **options),
        DrawnFusion([EmbeddedDrafter()], limits, draws=Draws(seed=1), **options),
    ):
        decoded(decoder_ahead(tiny_llama(), drafter), prompt_of(20), 24)


def compile_stages() -> None:
    """Ask for stages of a draft by themselves, as tests do."""
    import numpy as np  # noqa: PLC0415  (as above)

    from retriever.kernels.layout import Scratch  # noqa: PLC0415
    from retriever.predict.context import Context  # noqa: PLC0415
    from retriever.predict.generations import Generations  # noqa: PLC0415
    from tests.retriever.kernels.stages import collect_sequence, collect_store  # noqa: PLC0415

    context, scratch = Context(np.arange(9, dtype=np.int32)), Scratch(8)
    collect_sequence(context, 8, scratch)
    collect_store(Generations(0).arrays[0], 2, context.last(9), 8, scratch)


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sys.stdout.write("held\n")
        sys.stdout.flush()
        compile_drafting(50)
        # What fusing needs beside what token ids of four bytes need; both need what there is now.
        fusion = get_context("spawn").Process(target=compile_fusion)
        fusion.start()
        compile_stages()
        compile_drafting(70_000)
        fusion.join()
