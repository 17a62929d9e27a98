"""Drafts inside llama-cpp-python: see docs/how-to/engines.md.

python examples/llama_cpp_generate.py model.gguf "What is a trie?" --index my.index
python examples/llama_cpp_generate.py model.gguf "What is a trie?" --server unix:drafts.sock
"""

import argparse
from pathlib import Path

from llama_cpp import Llama

from foredraft import EmbeddedDrafter, ResilientDrafter
from foredraft.llama_cpp import attach


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
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("prompt")
    parser.add_argument("--index", type=Path, action="append", default=[])
    parser.add_argument("--server", action="append", default=[])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    llm = Llama(options.model, n_ctx=2048, logits_all=True, verbose=False)
    drafter = drafter_of(options)
    draft_model = attach(llm, drafter)
    chunks = llm.create_completion(
        options.prompt, max_tokens=options.max_new_tokens, temperature=0.0, stream=True
    )
    for chunk in chunks:
        print(chunk["choices"][0]["text"], end="", flush=True)
    draft_model.close()
    drafter.shut_down()
    print(f"\n{draft_model.num_accepted} of {draft_model.num_drafted} drafted tokens accepted")


if __name__ == "__main__":
    main()
