"""Products by packed copies of weights: those of torch, whatever becomes of the weights."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from decoder.model.products import Products
from decoder.model.target import Target
from decoder.model.user_model import multiplying
from retriever.tree import DraftTree
from tests.decoder.decoding import MODELS, prompt_of, random_tree
from tests.decoder.rounding import Rounding

ALL_LAYERS: Final = {torch.float32: 1}
"""Packs the layers of a tiny model as well."""

ROUNDING: Final = Rounding(torch.float32, width=8, operations=1)


class CountedProducts(TorchDispatchMode):
    """Counts products with packed weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += func.overloadpacket is torch.ops.mkldnn._linear_pointwise
        return func(*args, **(kwargs or {}))


def num_packed(part: nn.Module, products: Products, num_calls: int = 3) -> int:
    """Return how many products of some calls were made by packed weights, and check each."""
    with torch.no_grad(), CountedProducts() as counted:
        for rows in range(num_calls):
            states = torch.randn(2, rows, 8)
            expected = part(states)
            with multiplying(products):
                ROUNDING.check(part(states), expected)
    count: int = counted.count
    return count


class Fan(nn.Module):
    """Multiplies the same rows by several weights, one after the other.

    Args:
        sizes: rows of each weight.
        bias: whether something is added.
    """

    def __init__(self, *sizes: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, size, bias=bias) for size in sizes)
        self.asked = list(range(len(sizes)))
        self.between: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made = []
        for number in self.asked:
            made.append(self.parts[number](rows))
            rows = self.between(rows)
        return torch.cat(made, dim=-1)


def num_joined(fan: Fan, products: Products, num_passes: int, *, joins: bool = True) -> int:
    """Return how many products the last of some passes was made of, and check each pass."""
    count = 0
    with torch.inference_mode():
        for number in range(num_passes):
            rows = torch.randn(2, 1 + number % 3, 8)
            expected = fan(rows.clone())
            with CountedProducts() as counted, multiplying(products, joins=joins):
                ROUNDING.check(fan(rows), expected)
            count = counted.count
    return count


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_the_same_rows_are_made_at_once(*, bias: bool) -> None:
    products, fan = Products(ALL_LAYERS), Fan(8, 4, 6, bias=bias)
    assert num_joined(fan, products, 1) == 0
    assert num_joined(fan, products, 1) == 1
    assert products.num_bytes == 4 * 8 * (8 + 4 + 6)
    assert num_joined(fan, products, 2, joins=False) == 3
    assert products.num_bytes == 4 * 8 * (8 + 4 + 6)
    assert num_joined(fan, products, 2) == 1


@pytest.mark.parametrize("change", ["in place", "through data"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_no_joint_product_is_made_by_what_a_weight_was(number: int, change: str) -> None:
    products, fan = Products(ALL_LAYERS), Fan(8, 4, 6)
    num_joined(fan, products, 2)
    assert not products.audit()
    with torch.no_grad():
        CHANGES[change](fan.parts[number].weight)
    products.audit()
    assert num_joined(fan, products, 1) < 3
    assert num_joined(fan, products, 20) == 1  # once packing pays again


def test_biases_count_as_they_are() -> None:
    products, fan = Products(ALL_LAYERS), Fan(8, 4, bias=True)
    num_joined(fan, products, 3)
    fan.parts[1].get_parameter("bias").data.mul_(3)
    assert num_joined(fan, products, 1) == 1
    fan.parts[0].bias = nn.Parameter(torch.randn(8))
    assert num_joined(fan, products, 3) == 1
    fan.parts[1].register_parameter("bias", None)
    assert num_joined(fan, products, 3) == 2


def test_a_weight_that_is_not_asked_for_with_the_others_is_alone_from_then_on() -> None:
    products, fan = Products(ALL_LAYERS), Fan(8, 4, 6)
    assert num_joined(fan, products, 2) == 1
    for asked in ([0, 2], [1, 0, 2], [1], [0, 1, 2, 0], [2, 2]):
        fan.asked = asked
        num_joined(fan, products, 3)
    fan.asked = [0, 1, 2]
    assert num_joined(fan, products, 3) == 3


def test_other_rows_are_multiplied_by_themselves() -> None:
    products, fan = Products(ALL_LAYERS), Fan(8, 4, 6)
    assert num_joined(fan, products, 2) == 1
    fan.between = lambda rows: rows + 1
    assert num_joined(fan, products, 1) == 3
    apart = Fan(8, 4, 6)
    apart.between = lambda rows: rows * 2
    assert num_joined(apart, Products(ALL_LAYERS), 4) == 3


def test_a_joint_copy_goes_with_any_of_its_weights() -> None:
    products, fan = Products(ALL_LAYERS), Fan(8, 4, 6)
    num_joined(fan, products, 2)
    fan.parts[1].weight = nn.Parameter(torch.randn(4, 8))
    assert products.num_bytes == 0
    assert num_joined(fan, products, 3) == 1
    del fan
    assert products.num_bytes == 0


def logits_of(
    model: PreTrainedModel, tree: DraftTree, *, pack: bool | dict[torch.dtype, int]
) -> tuple[torch.Tensor, int]:
    target = Target(model, pack=pack)
    for _ in range(2):  # a weight is packed when it is met again
        target.prefill(np.array(prompt_of(20), np.int32))
    return target.verify(5, tree), target.packed_bytes


@pytest.mark.parametrize("name", MODELS)
def test_packed_weights_change_nothing_but_rounding(name: str) -> None:
    model = MODELS[name]()
    linear_bytes = sum(
        4 * part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear)
    )
    for width in (0, 1, 20, 60):
        tree = random_tree(np.random.default_rng(width), width)
        packed, num_bytes = logits_of(model, tree, pack=ALL_LAYERS)
        plain, none = logits_of(model, tree, pack=False)
        assert (num_bytes, none) == (linear_bytes, 0)
        Rounding.of(model, keys=21 + width).check(packed, plain)


def test_weights_that_cannot_be_packed_are_multiplied_by_torch() -> None:
    products = Products({torch.float32: 64})
    assert num_packed(nn.Linear(8, 8), products) == 2  # not when it is met first
    small = nn.Linear(8, 2)
    turned = nn.Linear(8, 8)
    turned.weight = nn.Parameter(torch.randn(8, 8).T)
    computed = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
    for part in (small, turned, computed):
        assert num_packed(part, products) == 0


def test_no_product_is_packed_where_torch_would_do_more() -> None:
    products, part = Products(ALL_LAYERS), nn.Linear(8, 8)
    assert num_packed(part, products) == 2
    states = torch.randn(3, 8)
    with multiplying(products):
        assert part(states).requires_grad
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert part(states).dtype == torch.bfloat16
    assert functional.linear is torch._C._nn.linear


def set_data(weight: torch.Tensor) -> None:
    weight.data = torch.randn(8, 8)


def exchange_words(weight: torch.Tensor) -> None:
    weight.data.copy_(weight.data[:, [2, 3, 0, 1, 4, 5, 6, 7]])


def write_by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[3, 4] += 1


CHANGES: Final[dict[str, Callable[[Any], object]]] = {
    "in place": lambda weight: weight.mul_(2),
    "through data": lambda weight: weight.data.mul_(2),
    "one number through data": lambda weight: weight.data[7].fill_(0.5),
    "other data": set_data,
    "words exchanged": exchange_words,
    "through numpy": write_by_numpy,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_product_is_made_by_what_a_weight_was(change: Callable[[Any], object]) -> None:
    products, part = Products(ALL_LAYERS), nn.Linear(8, 8)
    assert num_packed(part, products) == 2
    assert not products.audit()
    with torch.no_grad():
        change(part.weight)
    products.audit()
    assert num_packed(part, products, num_calls=20) == 4  # packed again once that pays
    assert not products.audit()


def test_copies_go_with_their_weights() -> None:
    products, part = Products(ALL_LAYERS), nn.Linear(8, 8)
    num_packed(part, products)
    assert products.num_bytes == 4 * 64
    part.weight = nn.Parameter(torch.randn(8, 8))
    assert products.num_bytes == 0
    assert num_packed(part, products) == 2
