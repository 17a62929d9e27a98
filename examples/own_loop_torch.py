"""Your own decoding loop around a model in plain PyTorch: see docs/how-to/generating.md."""

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from foredraft import DraftRequest, EmbeddedDrafter, verify

torch.manual_seed(0)
embed, place = torch.randn(50, 32), torch.randn(512, 32) / 20  # the model: one layer
to_query, to_key, to_value, to_logits = (torch.randn(32, n) / 6 for n in (32, 32, 32, 50))
cache = torch.empty(2, 0, 32)  # keys and values of the tokens read so far


def read(tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    """Return the logits of some rows, and append the rows' keys and values to the cache."""
    global cache  # noqa: PLW0603  the shortest cache there is
    states = embed[tokens] + place[positions]
    cache = torch.cat([cache, torch.stack([states @ to_key, states @ to_value])], 1)
    attended = attend(states @ to_query, cache[0], cache[1], torch.from_numpy(mask))
    return (states + attended) @ to_logits


drafter, tokens, new, num_passes = EmbeddedDrafter(), [1, 2, 3, 4], np.empty(0, np.int32), 0
drafter.open("mine", np.array(tokens, np.int32))
read(np.array(tokens[:-1]), np.arange(3), np.tri(3, dtype=bool))
while len(tokens) < len(place) // 5:
    [tree] = drafter.draft([DraftRequest("mine", new, len(tokens), 16)])
    past = len(tokens) - 1
    rows, positions = verify.tokens(tokens[-1], tree), verify.positions(tree, past)
    path, token = verify.accept_greedy(tree, read(rows, positions, verify.mask(tree, past)))
    cache = cache[:, [*range(past), *(past + verify.kept_rows(path))]]
    new = np.append(tree.token_ids[path], token).astype(np.int32)
    tokens, num_passes = [*tokens, *new.tolist()], num_passes + 1
print(*tokens[4:24], "...")
print(f"{len(tokens[4:]) / num_passes:.1f} tokens per pass")
