"""Small corpora on disk for the tests of engines, and a way to compare what is built of them."""

import random
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from indexer.build import BuildOptions, build_index
from indexer.change.changes import add_documents, compact, remove_documents
from indexer.engines import Engine
from indexer.sources import SourceOptions


def save_byte_tokenizer(folder: Path) -> Path:
    """Write a tokenizer that knows the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def write_corpus(folder: Path, num_files: int, num_words: int, seed: int = 0) -> Path:
    """Write files of words, of which few are frequent, and one file that is there twice."""
    rng = random.Random(seed)
    words = [
        "".join(rng.choices("etaoinshrdlu", k=rng.randrange(2, 9))) for _ in range(num_words // 4)
    ]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    folder.mkdir()
    for number in range(num_files):
        text = " ".join(rng.choices(words, weights, k=num_words))
        (folder / f"{number:03d}.txt").write_text(text)
    shutil.copy(folder / "000.txt", folder / "repeated.txt")
    return folder


def _options(engine: Engine) -> BuildOptions:
    """Return options with which a small corpus is many tasks."""
    sources = SourceOptions(block_bytes=1 << 12)
    return BuildOptions(sources, segment_tokens=7_000, keep_texts=True, engine=engine)


def build(sources: Path, output: Path, tokenizer: Path, engine: Engine) -> dict[str, bytes]:
    """Build in several segments and return all files of the index."""
    options = _options(engine)
    build_index([sources], output, str(tokenizer), options)
    return _contents(output, "built")


def build_and_change(
    sources: Path, more: Path, output: Path, tokenizer: Path, engine: Engine
) -> dict[str, bytes]:
    """Build, add, remove and compact; return all files of the index after each."""
    options = _options(engine)
    contents = build(sources, output, tokenizer, engine)
    add_documents(output, [more], options)
    contents |= _contents(output, "added")
    remove_documents(output, [str(sources / "001.txt")], ["*/more/00[0-2].txt"], options)
    contents |= _contents(output, "removed")
    compact(output, BuildOptions(engine=engine))
    return contents | _contents(output, "compacted")


def _contents(path: Path, step: str) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {f"{step} {file.relative_to(path)}": file.read_bytes() for file in files}
