"""What people do to a model that they generate with: each changes a tiny one, always alike."""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SIZE: Final = 32
VOCABULARY: Final = 300


def tiny(seed: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model whose outputs change whenever it does."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def _random(*shape: int, seed: int = 8) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.4


def _layer(model: Any, at: int = 1) -> Any:
    return model.model.layers[at]


@torch.no_grad()
def add_to_all(model: Any) -> None:
    for at, weight in enumerate(model.parameters()):
        weight.add_(_random(*weight.shape, seed=at).to(weight.dtype))


@torch.no_grad()
def copy_into_one(model: Any) -> None:
    _layer(model).mlp.up_proj.weight.copy_(_random(64, SIZE))


def load_state(model: Any) -> None:
    model.load_state_dict(tiny(seed=11).state_dict())


def assign_state(model: Any) -> None:
    model.load_state_dict(tiny(seed=11).state_dict(), assign=True)


def train_a_step(model: Any, kind: Any = torch.optim.SGD, rate: float = 0.5) -> None:
    with torch.enable_grad():
        tokens = torch.arange(3, 20)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        kind(model.parameters(), lr=rate).step()
        model.zero_grad()


def train_by_adam(model: Any) -> None:
    train_a_step(model, torch.optim.AdamW, 0.1)


def multiply_data(model: Any) -> None:
    _layer(model).self_attn.v_proj.weight.data.mul_(1.7)


def add_to_data(model: Any) -> None:
    weight = model.lm_head.weight
    weight.data += _random(VOCABULARY, SIZE)


def write_through_numpy(model: Any) -> None:
    _layer(model).mlp.down_proj.weight.detach().numpy()[:] *= -1.0


def exchange_columns(model: Any) -> None:
    data = _layer(model).mlp.gate_proj.weight.data
    data.copy_(data[:, torch.arange(SIZE).view(-1, 4).flip(0).flatten()])


def replace_data(model: Any) -> None:
    _layer(model).mlp.up_proj.weight.data = _random(64, SIZE)


def exchange_data(model: Any) -> None:
    one, other = (_layer(model, at).mlp.up_proj.weight for at in range(2))
    one.data, other.data = other.data, one.data


def exchange_parameters(model: Any) -> None:
    one, other = (_layer(model, at).mlp for at in range(2))
    one.up_proj.weight, other.up_proj.weight = other.up_proj.weight, one.up_proj.weight


def exchange_layers(model: Any) -> None:
    layers = model.model.layers
    one, other = layers[0], layers[1]
    layers[0], layers[1] = other, one
    other.self_attn.layer_idx, one.self_attn.layer_idx = 0, 1


def share_a_module(model: Any) -> None:
    _layer(model).mlp = _layer(model, 0).mlp


def drop_a_layer(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


def replace_mlp(model: Any) -> None:
    torch.manual_seed(8)
    _layer(model).mlp = type(_layer(model).mlp)(model.config).eval()


def replace_attention(model: Any) -> None:
    torch.manual_seed(8)
    _layer(model).self_attn = type(_layer(model).self_attn)(model.config, 1).eval()


class Doubling(nn.Module):
    """A module of the user's own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        return 2 * self.inner(*args, **options)


def wrap_norm(model: Any) -> None:
    _layer(model).input_layernorm = Doubling(_layer(model).input_layernorm)


class Around(nn.Module):
    """Stands around a whole model, and hands on all it is asked."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, *args: Any, **options: Any) -> Any:
        found = self.inner(*args, **options)
        found.last_hidden_state = -found.last_hidden_state
        return found


def wrap_base(model: Any) -> None:
    model.model = Around(model.model)


def replace_head(model: Any) -> None:
    torch.manual_seed(8)
    model.lm_head = nn.Linear(SIZE, VOCABULARY, bias=False)


def give_head_a_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(_random(VOCABULARY) * 20)


def replace_embedding(model: Any) -> None:
    torch.manual_seed(8)
    model.set_input_embeddings(nn.Embedding(VOCABULARY, SIZE))


def tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def untie(model: Any) -> None:
    tie(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0).clone())


def enlarge(model: Any) -> None:
    torch.manual_seed(8)
    model.resize_token_embeddings(VOCABULARY + 20)


def shrink(model: Any) -> None:
    model.resize_token_embeddings(VOCABULARY - 30)


def to_double(model: Any) -> None:
    model.to(torch.float64)


def round_trip(model: Any) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def hook_on_projection(model: Any) -> None:
    _layer(model, 0).self_attn.o_proj.register_forward_hook(lambda *given: given[-1] * 0.2)


def hook_in_place(model: Any) -> None:
    """On one of three products of one input: the third sees it, too."""
    _layer(model).self_attn.k_proj.register_forward_pre_hook(lambda _, given: given[0].mul_(1.5))


def hook_on_mlp(model: Any) -> None:
    _layer(model).mlp.register_forward_hook(lambda *given: -given[-1])


def hook_before_layer(model: Any) -> None:
    _layer(model).register_forward_pre_hook(lambda _, given: (given[0] * 1.3, *given[1:]))


def hook_on_norm(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda *given: given[-1].roll(1, -1))


def hook_on_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda *given: -given[-1])


def hook_on_model(model: Any) -> None:
    def negated(_: Any, __: Any, output: Any) -> None:
        output.logits = -output.logits

    model.register_forward_hook(negated)


def hook_and_unhook(model: Any) -> None:
    _layer(model).mlp.register_forward_hook(lambda *given: -given[-1]).remove()


def hook_with_memory(model: Any) -> None:
    """Steered by something that no module shows."""
    strength = {"now": 1.0}
    _layer(model).mlp.register_forward_hook(lambda *given: given[-1] * strength["now"])
    strength["now"] = -1.0


def wrap_forward(model: Any) -> None:
    old = model.forward

    @functools.wraps(old)
    def forward(*args: Any, **options: Any) -> Any:
        return old(*args, **options)

    model.forward = forward


def bind_forward(model: Any) -> None:
    kind = type(model).forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        output = kind(self, *args, **options)
        output.logits = -output.logits
        return output

    model.forward = types.MethodType(forward, model)


def bind_mlp(model: Any) -> None:
    mlp = _layer(model).mlp
    kind = type(mlp).forward
    mlp.forward = lambda states: kind(mlp, states).flip(-1)


def bind_layer(model: Any) -> None:
    layer = _layer(model)
    kind = type(layer).forward
    layer.forward = lambda states, **options: kind(layer, states.flip(-1), **options)


def functional_mlp(model: Any) -> None:
    mlp = _layer(model).mlp
    other = {name: -weight.detach() for name, weight in mlp.named_parameters()}
    kind = type(mlp).forward

    def plain(states: torch.Tensor) -> Any:
        return kind(mlp, states)

    def forward(states: torch.Tensor) -> Any:
        mlp.forward = plain
        try:
            return torch.func.functional_call(mlp, other, (states,))
        finally:
            mlp.forward = forward

    mlp.forward = forward


class Halved(nn.Module):
    """A parametrisation."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


def parametrised(model: Any) -> None:
    parametrize.register_parametrization(_layer(model).mlp.up_proj, "weight", Halved())


def spectral_norm(model: Any) -> None:
    torch.manual_seed(8)
    parametrizations.spectral_norm(_layer(model).mlp.up_proj)


def pruned(model: Any) -> None:
    torch.manual_seed(8)
    cut: Any = prune.random_unstructured
    cut(_layer(model).mlp.up_proj, "weight", amount=0.5)


class LowRank(nn.Module):
    """An adapter around a linear layer, which can be switched and merged."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.factors = {seed: (_random(4, SIZE, seed=seed), _random(SIZE, 4)) for seed in (1, 2)}
        self.active: int | None = 1

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(states)
        if self.active is None:
            return output
        down, up = (factor.to(states.dtype) for factor in self.factors[self.active])
        return output + states @ down.T @ up.T

    def merge(self, sign: int) -> None:
        down, up = self.factors[1]
        self.inner.weight.data += sign * (up @ down).to(self.inner.weight.dtype)
        self.active = None if sign > 0 else 1


def _adapted(model: Any) -> LowRank:
    attention = _layer(model).self_attn
    if not isinstance(attention.q_proj, LowRank):
        attention.q_proj = LowRank(attention.q_proj)
    adapter: LowRank = attention.q_proj
    return adapter


def inject_adapter(model: Any) -> None:
    _adapted(model)


def switch_adapter(model: Any) -> None:
    _adapted(model).active = 2


def disable_adapter(model: Any) -> None:
    _adapted(model).active = None


def merge_adapter(model: Any) -> None:
    _adapted(model).merge(1)


def unmerge_adapter(model: Any) -> None:
    _adapted(model).merge(1)
    _adapted(model).merge(-1)


def remove_adapter(model: Any) -> None:
    _layer(model).self_attn.q_proj = _adapted(model).inner


def checkpoint_gradients(model: Any) -> None:
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)()


def train_mode(model: Any) -> None:
    model.train()


def train_with_checkpoints(model: Any) -> None:
    model.train()
    checkpoint_gradients(model)


def freeze(model: Any) -> None:
    model.requires_grad_(requires_grad=False)


def eager_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def ask_for_states(model: Any) -> None:
    model.config.output_hidden_states = True


def scale_attention(model: Any) -> None:
    _layer(model).self_attn.scaling *= 3


def turn_faster(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(1.5)


def rename_labels(model: Any) -> None:
    model.config.problem_type = "single_label_classification"


CHANGES: Final[dict[str, Callable[[Any], None]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        add_to_all,
        copy_into_one,
        load_state,
        assign_state,
        train_a_step,
        train_by_adam,
        replace_data,
        exchange_data,
        exchange_parameters,
        exchange_layers,
        share_a_module,
        drop_a_layer,
        replace_mlp,
        replace_attention,
        wrap_norm,
        wrap_base,
        replace_head,
        give_head_a_bias,
        replace_embedding,
        tie,
        untie,
        enlarge,
        shrink,
        to_double,
        round_trip,
        hook_on_projection,
        hook_in_place,
        hook_on_mlp,
        hook_before_layer,
        hook_on_norm,
        hook_on_head,
        hook_on_model,
        hook_and_unhook,
        hook_with_memory,
        wrap_forward,
        bind_forward,
        bind_mlp,
        bind_layer,
        functional_mlp,
        parametrised,
        spectral_norm,
        pruned,
        inject_adapter,
        switch_adapter,
        disable_adapter,
        remove_adapter,
        checkpoint_gradients,
        train_mode,
        train_with_checkpoints,
        freeze,
        eager_attention,
        ask_for_states,
        scale_attention,
        turn_faster,
        rename_labels,
    )
}
"""Changes that the next pass sees."""

UNSEEN: Final[dict[str, Callable[[Any], None]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        multiply_data,
        add_to_data,
        write_through_numpy,
        exchange_columns,
        merge_adapter,
        unmerge_adapter,
    )
}
"""Changes that move no counter: the next generation sees them, and a pass if it is told."""


@contextmanager
def for_all_models() -> Iterator[list[str]]:
    """Change what all models share during the block: attention, a kind of module, all hooks."""
    mlp = type(_layer(tiny()).mlp)
    forward = mlp.forward
    with ExitStack() as undone:
        undone.callback(setattr, mlp, "forward", forward)
        mlp.forward = lambda self, states: forward(self, states * 0.5)
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, _, output: -output if isinstance(module, mlp) else None
        )
        undone.callback(hook.remove)
        calls: list[str] = []

        def attention(*args: Any, **options: Any) -> Any:
            calls.append("attention")
            output, weights = sdpa_attention_forward(*args, **options)
            return output * 0.7, weights

        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
        undone.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, "sdpa")
        yield calls
