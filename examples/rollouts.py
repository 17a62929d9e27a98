"""Rollouts with drafts while the model is trained: see docs/how-to/generating.md.

python examples/rollouts.py                        # a tiny model, created here
python examples/rollouts.py --model path/to/model --steps 20

Each step generates a group of answers to a prompt, rewards answers with many different tokens, and
takes a policy-gradient step. Each step also compares a greedy answer with drafts to the model's own
answer, because drafts must never change what the current policy generates.
"""

import argparse
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from foredraft import EmbeddedDrafter, Foredraft, SequenceOptions

NUM_PROMPTS = 4
NUM_PROMPT_TOKENS = 16


def made_model(path: str | None) -> Any:
    """Return the model at a path, or a tiny model with random weights."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def rewards_of(answers: torch.Tensor) -> torch.Tensor:
    """Return float[rows], how much better each answer is than its group, in standard deviations."""
    variety = torch.tensor([len(set(row)) / len(row) for row in answers.tolist()])
    return (variety - variety.mean()) / (variety.std() + 1e-6)


def loss_of(model: Any, sequences: torch.Tensor, rewards: torch.Tensor) -> Any:
    """Return the loss whose gradient makes rewarded answers more likely."""
    logits = model(sequences[:, :-1]).logits[:, NUM_PROMPT_TOKENS - 1 :]
    chosen = sequences[:, NUM_PROMPT_TOKENS:, None]
    likely = logits.log_softmax(dim=-1).gather(-1, chosen)[..., 0]
    return -(rewards[:, None] * likely).mean()


def trained(model: Any, foredraft: Foredraft, options: argparse.Namespace) -> Iterator[Any]:
    """Train; yield each step's reward, and its time in seconds with and without drafts."""
    prompts = torch.randint(3, model.config.vocab_size, (NUM_PROMPTS, NUM_PROMPT_TOKENS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    length = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "pad_token_id": 0}
    for step in range(options.steps):
        prompt = prompts[[step % NUM_PROMPTS]]
        group = {"do_sample": True, "num_return_sequences": options.group, **length}
        began = perf_counter()
        sequences = model.generate(
            prompt,
            **group,
            custom_generate=foredraft,
            options=SequenceOptions(group=f"prompt {step % NUM_PROMPTS}"),
        )
        between = perf_counter()
        model.generate(prompt, **group)
        took = (between - began, perf_counter() - between)

        greedy = model.generate(prompt, do_sample=False, **length)
        drafted = model.generate(prompt, do_sample=False, **length, custom_generate=foredraft)
        if drafted.tolist() != greedy.tolist():
            raise SystemExit(f"step {step}: drafts changed the output")

        answers = sequences[:, NUM_PROMPT_TOKENS:]
        loss = loss_of(model, sequences, rewards_of(answers))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield took, sum(len(set(row)) for row in answers.tolist()) / answers.numel()


def main() -> None:
    """Train a model on its own answers, which are generated with drafts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", help="a hub id or a folder; a tiny model by default")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--group", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = made_model(options.model)
    drafter = EmbeddedDrafter()
    drafter.warm()
    foredraft = Foredraft(model, drafter, counts_versions=True)
    took = []
    for step, (seconds, reward) in enumerate(trained(model, foredraft, options), 1):
        took.append(seconds)
        if step % 10 == 0 or step == options.steps:
            print(f"step {step}: {reward:.2f} of an answer's tokens are distinct")
    with_drafts, without = (sum(each) for each in zip(*took, strict=True))
    print(f"all {len(took)} greedy answers with drafts equal the model's own answers")
    print(f"rollouts took {with_drafts:.1f} s with drafts and {without:.1f} s without")
    print(foredraft.statistics.summary())
    drafter.shut_down()


if __name__ == "__main__":
    main()
