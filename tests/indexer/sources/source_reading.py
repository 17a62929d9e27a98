"""Reading sources from end to end, and making some."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from indexer.build_report import BuildTally
from indexer.sources import SourceBlock, SourceDocument, SourceOptions, plan, read


def read_blocks(
    blocks: Sequence[SourceBlock], options: SourceOptions, tally: BuildTally
) -> list[SourceDocument]:
    return [document for block in blocks for document in read(block, options, tally)]


def read_all(*sources: Path | str, **options: Any) -> tuple[list[SourceDocument], BuildTally]:
    """Return the documents of sources; cut into small blocks they must be the same."""
    chosen = SourceOptions(**options)
    tally = BuildTally()
    documents = read_blocks(plan(sources, chosen, tally), chosen, tally)
    assert tally.num_bytes_read == tally.num_bytes_found

    again = BuildTally()
    small = replace(chosen, block_bytes=1)
    assert read_blocks(plan(sources, small, again), small, again) == documents
    assert (again.skipped, again.skipped_places) == (tally.skipped, tally.skipped_places)
    assert again.num_bytes_read == again.num_bytes_found == tally.num_bytes_found
    return documents, tally


def texts(documents: Sequence[SourceDocument]) -> dict[str, str]:
    assert len({document.name for document in documents}) == len(documents)
    return {document.name: document.text for document in documents}


def json_lines(*rows: object) -> str:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def write(folder: Path, **files: str) -> None:
    """Write files whose names are given with `__` for a slash and `_` for a dot."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
