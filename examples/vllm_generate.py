"""Drafts inside vLLM: see docs/how-to/engines.md.

python examples/vllm_generate.py path/to/model "What is a trie?" --index my.index
python examples/vllm_generate.py path/to/model "What is a trie?" --server unix:drafts.sock
"""

import argparse
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    """Answer a prompt twice, the second time with drafts from the first answer; print counts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", help="a hub id or a folder")
    parser.add_argument("prompt")
    parser.add_argument("--index", type=Path, action="append", default=[])
    parser.add_argument("--server", action="append", default=[])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    options = parser.parse_args()
    llm = LLM(
        options.model,
        max_model_len=2048,
        speculative_config={
            "method": "custom_class",
            "model": "foredraft.vllm.ForedraftProposer",
            "num_speculative_tokens": options.num_speculative_tokens,
        },
        additional_config={
            "foredraft": {
                "index": [str(path.resolve()) for path in options.index],
                "server": options.server,
            }
        },
        disable_log_stats=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=options.max_new_tokens)
    message = [{"role": "user", "content": options.prompt}]
    for _ in range(2):
        print(llm.chat(message, sampling)[0].outputs[0].text)
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value"):
            print(metric.name, metric.value)


if __name__ == "__main__":
    main()
