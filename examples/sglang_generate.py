"""Text from SGLang with drafts: `python examples/sglang_generate.py MODEL PROMPT`.

For a server, run: FOREDRAFT_INDEX=my.index sglang serve --model-path MODEL
--speculative-algorithm FOREDRAFT --speculative-num-draft-tokens 16
"""

import argparse
import json
import os

import sglang


def main() -> None:
    """Generate greedily; print the text and the mean number of tokens per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder or a hub id")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--index", help="an index built with the model's own tokenizer")
    parser.add_argument("--server", help="a draft service, HOST:PORT, instead of an index")
    parser.add_argument("--plain", action="store_true", help="without drafts, to compare")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()

    # SGLang's processes read these settings; docs/how-to/engines.md lists them.
    for name in ("index", "server"):
        if getattr(options, name):
            os.environ[f"FOREDRAFT_{name.upper()}"] = getattr(options, name)
    drafts = {"speculative_algorithm": "FOREDRAFT", "speculative_num_draft_tokens": 16}
    engine = sglang.Engine(model_path=options.model, **({} if options.plain else drafts))
    sampling = {"temperature": 0.0, "max_new_tokens": options.max_new_tokens}
    for answer in engine.generate(options.prompts, sampling):
        print(json.dumps(answer["text"]), answer["meta_info"].get("spec_accept_length", ""))
    engine.shutdown()


if __name__ == "__main__":
    main()
