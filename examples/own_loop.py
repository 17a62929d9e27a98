"""Your own decoding loop around a transformers model: see docs/how-to/generating.md."""

import numpy as np
import torch
from transformers import DynamicCache

from foredraft import DraftRequest, EmbeddedDrafter, ModelOptions, load_model, verify

loaded, drafter = load_model(ModelOptions("smollm2-135m-instruct")), EmbeddedDrafter()


@torch.no_grad()
def generate(prompt: list[int], num_tokens: int, num_nodes: int = 16) -> tuple[list[int], int]:
    """Return the greedy output, and the number of passes after the prompt's pass."""
    model, cache, num_passes = loaded.model, DynamicCache(), 0
    drafter.open("mine", np.array(prompt, np.int32))
    logits = model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1).logits[0]
    tokens, new = [*prompt, int(logits.argmax())], logits.argmax(-1).int().numpy()
    while len(tokens) < len(prompt) + num_tokens:
        [tree] = drafter.draft([DraftRequest("mine", new, len(tokens), num_nodes)])
        past = len(tokens) - 1
        logits = model(
            torch.from_numpy(verify.tokens(tokens[-1], tree))[None],
            attention_mask=verify.additive_mask(tree, past, model.dtype),
            position_ids=torch.from_numpy(verify.positions(tree, past))[None],
            past_key_values=cache,
        ).logits[0]
        path, token = verify.accept_greedy(tree, logits)
        kept = np.concatenate([np.arange(past), past + verify.kept_rows(path)])
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        new = np.append(tree.token_ids[path], token).astype(np.int32)
        tokens, num_passes = [*tokens, *new.tolist()], num_passes + 1
    drafter.close("mine", new)
    return tokens[len(prompt) :][:num_tokens], num_passes


text = "".join(f"def add_{n}(x):\n    return x + {n}\n\n\n" for n in range(1, 8))  # or your text
written, passes = generate(loaded.tokenizer(text)["input_ids"], 48)
print(f"{(len(written) - 1) / passes:.1f} tokens per pass:", loaded.tokenizer.decode(written[:24]))
