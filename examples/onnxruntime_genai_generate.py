"""Drafts inside ONNX Runtime GenAI: see docs/how-to/engines.md.

Export the model with paged attention, so that the engine can verify drafts:

python -m onnxruntime_genai.models.builder -m my/model -o exported -p fp16 -e cuda \
    --extra_options use_paged_attention=true
python examples/onnxruntime_genai_generate.py exported "What is a trie?" --index my.index
python examples/onnxruntime_genai_generate.py exported "What is a trie?" --server unix:drafts.sock
"""

import argparse
import json
from pathlib import Path

import onnxruntime_genai as og

from foredraft import EmbeddedDrafter, ResilientDrafter
from foredraft.onnxruntime_genai import DraftingLoop


def drafter_of(options: argparse.Namespace) -> EmbeddedDrafter | ResilientDrafter:
    """Return a drafter in this process, or a client of a service that also works if it fails."""
    if options.server:
        remote = ResilientDrafter(options.server)
        remote.wait(timeout_s=5.0)
        return remote
    drafter = EmbeddedDrafter.open_indexes(options.index)
    drafter.warm()
    return drafter


def main() -> None:
    """Stream a continuation of the prompt, then print how many drafted tokens were accepted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", type=Path, help="an exported model's folder")
    parser.add_argument("prompt", help="a text, or token ids with --tokens")
    parser.add_argument("--tokens", action="store_true", help="the prompt is token ids")
    parser.add_argument("--index", type=Path, action="append", default=[])
    parser.add_argument("--server", action="append", default=[])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    model = og.Model(str(options.model))
    config = json.loads((options.model / "genai_config.json").read_text())
    drafter = drafter_of(options)
    loop = DraftingLoop(og.Engine(model), drafter, config["model"]["vocab_size"])
    if options.tokens:
        prompt, shown = [int(token) for token in options.prompt.split()], "{} ".format
    else:
        tokenizer = og.Tokenizer(model)
        prompt, shown = tokenizer.encode(options.prompt), tokenizer.create_stream().decode
    for token in loop.generate(prompt, options.max_new_tokens):
        print(shown(token), end="", flush=True)
    loop.close()
    drafter.shut_down()
    print(f"\n{loop.num_accepted} of {loop.num_drafted} drafted tokens accepted")


if __name__ == "__main__":
    main()
