"""Drafts inside `model.generate` of transformers: see docs/how-to/engines.md.

python examples/transformers_generate.py path/to/model "What is a trie?" --index my.index
python examples/transformers_generate.py path/to/model "What is a trie?" --server unix:drafts.sock
"""

import argparse
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TextStreamer

from foredraft import EmbeddedDrafter, Foredraft, ResilientDrafter, vocabulary_of


def drafter_of(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> EmbeddedDrafter | ResilientDrafter:
    """Return a drafter in this process, or a client of a service that also works if it fails."""
    vocabulary = vocabulary_of(tokenizer)
    if options.server:
        remote = ResilientDrafter(options.server, vocabulary_fingerprint=vocabulary.fingerprint)
        remote.wait(timeout_s=5.0)
        return remote
    drafter = EmbeddedDrafter.open_indexes(options.index, vocabulary=vocabulary)
    drafter.warm()
    return drafter


def main() -> None:
    """Stream an answer to the prompt, then print how well the drafts worked."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", help="a hub id or a folder")
    parser.add_argument("prompt")
    parser.add_argument("--index", type=Path, action="append", default=[])
    parser.add_argument("--server", action="append", default=[])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
    drafter = drafter_of(options, tokenizer)
    foredraft = Foredraft(model, drafter, tokenizer=tokenizer)
    model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=options.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
        custom_generate=foredraft,
    )
    drafter.shut_down()
    print(foredraft.statistics.summary())


if __name__ == "__main__":
    main()
