"""The cost of verifying and committing a draft as the context grows, here and with a stock cache.

Both hold the same states, and both verify the same trees with the same weights (of SmolLM2-135M's
shapes, drawn at random: what is cached changes no cost). The stock way verifies with transformers'
attention and dynamic cache, and keeps a path by gathering the whole context.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from benchmarks.comparison import circumstances
from decoder.budget.cost_store import device_name
from decoder.model.attention import tree_mask
from decoder.model.passes import Reading
from decoder.model.target import Target
from decoder.model.user_model import cache_argument
from retriever.tree import DraftTree

CONTEXTS = (512, 1024, 2048, 4096, 8192)
WIDTHS = (1, 16, 32)
VOCABULARY = 49152
KEY_HEADS, HEAD_SIZE, LAYERS = 3, 64, 30


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds, in milliseconds.

    Attributes:
        context: tokens committed before the pass.
        width: tokens of the pass.
        verify_ms: of this decoder's pass.
        commit_ms: of keeping every second node of the tree's deepest path.
        stock_verify_ms: of transformers' own.
        stock_commit_ms: of gathering the context and the same path.
    """

    context: int
    width: int
    verify_ms: float
    commit_ms: float
    stock_verify_ms: float
    stock_commit_ms: float


def commit_costs(device: str, rounds: int) -> list[Row]:
    """Measure both on a device at contexts from 512 to 8,192 tokens, in turn."""
    model = _model(device)
    target = Target(model)
    return [
        _measure(model, target, context, width, rounds) for context in CONTEXTS for width in WIDTHS
    ]


def main(
    *,
    rounds: Annotated[int, typer.Option(help="Passes of each kind.")] = 9,
    threads: Annotated[int, typer.Option(help="Of torch; 0 for its own choice.")] = 0,
    device: Annotated[str, typer.Option(help="Where torch computes.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure both at contexts from 512 to 8,192 tokens, in turn."""
    if threads:
        torch.set_num_threads(threads)
    rows = commit_costs(device, rounds)
    if as_json:
        about = {**circumstances(), "device": device_name(torch.device(device)), "rounds": rounds}
        about["torch_threads"] = torch.get_num_threads()
        print(json.dumps({**about, "rows": list(map(asdict, rows))}, indent=1))
    else:
        print(_table(rows))


def _model(device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=2 * CONTEXTS[-1],
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    halved: PreTrainedModel = model.to(device, torch.bfloat16).eval()
    return halved


@torch.inference_mode()
def _measure(model: PreTrainedModel, target: Target, context: int, width: int, rounds: int) -> Row:
    tree, path = _draft(width)
    stock = _filled(target, context)
    times: list[list[float]] = []
    for _ in range(rounds + 1):
        taken = [
            _seconds(lambda: target.verify(0, tree), target.device),
            _seconds(lambda: target.commit(path), target.device),
            _seconds(lambda: _verify_stock(model, stock, tree, context), target.device),
            _seconds(lambda: _gather(stock, context, path, target.device), target.device),
        ]
        times.append(taken)
        target._committed[0] = context  # noqa: SLF001  the next round begins where this one did
        stock.crop(-1 - len(path))
    medians = [1e3 * statistics.median(column) for column in zip(*times[1:], strict=True)]
    return Row(context, width, *(round(median, 3) for median in medians))


def _draft(width: int) -> tuple[DraftTree, NDArray[np.int64]]:
    """Return a tree whose nodes have two children each, as far as they go, and a path of it."""
    nodes = np.arange(width - 1)
    tree = DraftTree(
        nodes.astype(np.int32),
        (nodes // 2 - 1).astype(np.int32),
        np.linspace(0.9, 0.1, width - 1, dtype=np.float32),
        np.zeros(width - 1, np.uint8),
    )
    return tree, tree.path_to(width - 2)


def _filled(target: Target, context: int) -> DynamicCache:
    """Let the target and a cache of transformers hold the same states of a context."""
    target.reset()
    stock = DynamicCache()
    for index, layer in enumerate(target._places.at(0).cache.growing_layers):  # type: ignore[attr-defined]  # noqa: SLF001
        states = torch.randn(
            2, 1, KEY_HEADS, context, HEAD_SIZE, dtype=torch.bfloat16, device=target.device
        )
        layer.update(states[0], states[1])
        stock.update(states[0], states[1], index)
    target._committed[0] = context  # noqa: SLF001  a prompt of this length would take minutes
    return stock


def _verify_stock(
    model: PreTrainedModel, stock: DynamicCache, tree: DraftTree, context: int
) -> None:
    reading = Reading.of(0, 0, tree)
    rows = reading.rows(context)
    arrays = rows.positions, reading.tokens.astype(np.int64)
    positions, tokens = (torch.from_numpy(array).to(model.device) for array in arrays)
    mask = None
    if len(tree):
        mask = tree_mask(
            rows,
            q_length=len(tokens),
            kv_length=context + len(tokens),
            kv_offset=0,
            mask_function=causal_mask_function,
            dtype=model.dtype,
            device=torch.device(model.device),
        )
    model(
        input_ids=tokens[None],
        attention_mask=mask,
        position_ids=positions[None],
        **{cache_argument(model): stock},
        use_cache=True,
    )


def _gather(
    stock: DynamicCache, context: int, path: NDArray[np.int64], device: torch.device
) -> None:
    kept = np.concatenate([np.arange(context + 1), path + context + 1])
    slots = torch.from_numpy(kept).to(device)
    layers: Sequence[Any] = stock.layers
    for layer in layers:
        layer.keys = layer.keys.index_select(-2, slots)
        layer.values = layer.values.index_select(-2, slots)


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _table(rows: Sequence[Row]) -> str:
    names = ("context", "width", "verify", "commit", "stock verify", "stock commit")
    lines = [f"{' | '.join(names)}   (ms)"]
    lines += [" | ".join(map(str, asdict(row).values())) for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
