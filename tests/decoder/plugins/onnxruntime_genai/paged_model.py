"""A tiny paged decoder for the engine, without attention kernels, which exist for GPUs alone.

The next token is a table's entry for the last two tokens. The one before the last is read back
from the paged cache, so that a rejected draft that stayed in it would change the output.
"""

import json
from itertools import count
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

VOCABULARY = 64
END = 1
_BLOCK = 4
_NUM_BLOCKS = 256
_CONTEXT = 512
_CACHE = [_NUM_BLOCKS, _BLOCK, 1, 1]


class Graph:
    """Nodes of a graph, named by number."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._numbers = count()

    def __call__(self, kind: str, *inputs: str, name: str = "", **attributes: object) -> str:
        name = name or f"value_{next(self._numbers)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, value: object) -> str:
        name = f"constant_{next(self._numbers)}"
        self.constants.append(numpy_helper.from_array(np.array(value, np.int64), name))
        return name

    def integers(self, name: str) -> str:
        return self("Cast", name, to=TensorProto.INT64)


def successors(seed: int) -> NDArray[np.int64]:
    """Return int64[VOCABULARY, VOCABULARY], the next token of each pair; few pairs end."""
    table = np.random.default_rng(seed).integers(2, VOCABULARY, (VOCABULARY, VOCABULARY))
    table[5, ::16] = END
    return table


def expected(table: NDArray[np.int64], prompt: list[int], num_tokens: int) -> list[int]:
    """Return what the model generates: the engine's end token is not shown."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        following = int(table[tokens[-2], tokens[-1]])
        if following == END:
            break
        tokens.append(following)
    return tokens[len(prompt) :]


def write_model(folder: Path, seed: int = 0) -> NDArray[np.int64]:
    """Write a model for the engine and return its table."""
    table = successors(seed)
    graph = _graph(table)
    model = helper.make_model(
        graph, opset_imports=[helper.make_operatorsetid("", 17)], ir_version=9
    )
    onnx.checker.check_model(model)
    onnx.save_model(model, str(folder / "decoder.onnx"))
    (folder / "genai_config.json").write_text(json.dumps(_config()))
    return table


def _graph(table: NDArray[np.int64]) -> onnx.GraphProto:
    graph = Graph()
    zero, one = graph.constant(0), graph.constant(1)
    column, flat = graph.constant([1]), graph.constant([-1])
    row, position = _places(graph)
    here = _slot(graph, row, position)
    before = _slot(graph, row, graph("Max", graph("Sub", position, one), zero))
    token = graph("Cast", "input_ids", to=TensorProto.FLOAT)
    written = {}
    for kind in ("key", "value"):
        cache = graph("Reshape", f"past_key_values.0.{kind}", flat)
        written[kind] = graph("ScatterND", cache, graph("Unsqueeze", here, column), token)
        shape = graph.constant(_CACHE)
        graph("Reshape", written[kind], shape, name=f"present.0.{kind}")
    last = graph.integers(graph("Gather", written["value"], here))
    one_before = graph.integers(graph("Gather", written["key"], before))
    pair = graph("Add", graph("Mul", one_before, graph.constant(VOCABULARY)), last)
    following = graph("Gather", graph.constant(table.ravel()), pair)
    every = graph.constant(np.arange(VOCABULARY)[None])
    is_it = graph("Equal", graph("Unsqueeze", following, column), every)
    graph("Cast", is_it, name="logits", to=TensorProto.FLOAT)
    return helper.make_graph(graph.nodes, "paged", _inputs(), _outputs(), graph.constants)


def _places(graph: Graph) -> tuple[str, str]:
    """Return the request that each packed token is of, and its position there."""
    zero, one = graph.constant(0), graph.constant(1)
    first_axis, column = graph.constant([0]), graph.constant([1])
    num_tokens = graph("Squeeze", graph("Shape", "input_ids"))
    at = graph("Range", zero, num_tokens, one)
    bounds = graph.integers("cumulative_sequence_lengths")
    ends = graph("Slice", bounds, column, graph.constant([1 << 62]), first_axis)
    is_behind = graph(
        "GreaterOrEqual", graph("Unsqueeze", at, column), graph("Unsqueeze", ends, first_axis)
    )
    row = graph("ReduceSum", graph.integers(is_behind), column, keepdims=0)
    offset = graph("Sub", at, graph("Gather", bounds, row))
    past = graph("Gather", graph.integers("past_sequence_lengths"), row)
    return row, graph("Add", past, offset)


def _slot(graph: Graph, row: str, position: str) -> str:
    """Return where the cache keeps the token at a position of a request."""
    column, size = graph.constant([1]), graph.constant(_BLOCK)
    block = graph("Div", position, size)
    inside = graph("Sub", position, graph("Mul", block, size))
    place = graph(
        "Concat", graph("Unsqueeze", row, column), graph("Unsqueeze", block, column), axis=1
    )
    number = graph("GatherND", graph.integers("block_table"), place)
    return graph("Add", graph("Mul", number, size), inside)


def _inputs() -> list[onnx.ValueInfoProto]:
    shapes: dict[str, list[str | int]] = {
        "cumulative_sequence_lengths": ["batch_plus_1"],
        "past_sequence_lengths": ["batch"],
        "block_table": ["batch", "max_blocks"],
        "attention_metadata": [3],
    }
    return [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["num_tokens"]),
        *(helper.make_tensor_value_info(n, TensorProto.INT32, s) for n, s in shapes.items()),
        *_cache("past_key_values"),
    ]


def _outputs() -> list[onnx.ValueInfoProto]:
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["num_tokens", VOCABULARY])
    return [logits, *_cache("present")]


def _cache(prefix: str) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(f"{prefix}.0.{kind}", TensorProto.FLOAT, _CACHE)
        for kind in ("key", "value")
    ]


def _config() -> dict[str, object]:
    named = ("input_ids", "block_table", "cumulative_sequence_lengths", "past_sequence_lengths")
    inputs = {name: name for name in (*named, "attention_metadata")}
    decoder = {
        "session_options": {"provider_options": []},
        "filename": "decoder.onnx",
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_size": 1,
        "hidden_size": 1,
        "num_hidden_layers": 1,
        "inputs": {
            **inputs,
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "state_groups": [{"kind": "paged_kv", "layer_ids": [0]}],
    }
    return {
        "model": {
            "type": "decoder",
            "bos_token_id": 0,
            "eos_token_id": END,
            "pad_token_id": 0,
            "vocab_size": VOCABULARY,
            "context_length": _CONTEXT,
            "decoder": decoder,
        },
        "search": {"max_length": _CONTEXT, "do_sample": False},
        "engine": {
            "dynamic_batching": {
                "block_size": _BLOCK,
                "num_blocks": _NUM_BLOCKS,
                "max_batch_size": 8,
            }
        },
    }
