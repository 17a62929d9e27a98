import math

import pytest
import torch

from tests.decoder.decoding import MODELS, prompt_of
from tests.decoder.rounding import SHOWN, Rounding

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 64, 1000])
def test_sums_in_any_order_part_by_rounding_only(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    left = torch.randn(30, width, generator=generator).to(dtype)
    right = torch.randn(width, 40, generator=generator).to(dtype)
    expected = left @ right
    rounding = Rounding(dtype, width, 1)
    for _ in range(10):
        order = torch.randperm(width, generator=generator)
        rounding.check(left[:, order] @ right[order], expected)
        pieces = [left[:, part] @ right[part] for part in order.chunk(3)]
        rounding.check(sum(pieces), expected)
    if dtype in {torch.float64, torch.float32}:
        assert rounding.apart(left[:, 1:] @ right[1:], expected) > SHOWN


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_model_rounds_as_much_as_its_layers_do(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name](dtype=dtype)
    tokens = torch.tensor([prompt_of(60)])
    whole = model(tokens).logits[0]
    parts = torch.stack([model(tokens[:, : end + 1]).logits[0, -1] for end in range(60)])
    rounding = Rounding.of(model)
    rounding.check(parts, whole)
    if dtype in {torch.float64, torch.float32}:
        wrong = tokens.clone()
        wrong[0, 0] += 1
        assert rounding.apart(model(wrong).logits[0, 1:], whole[1:]) > SHOWN


def test_what_is_no_number_or_of_another_shape_is_no_rounding() -> None:
    rounding = Rounding(torch.float32, 10, 1)
    values = torch.tensor([1.0, 2.0, -math.inf])
    rounding.check(values, values.clone())
    rounding.check(torch.zeros(0), torch.zeros(0))
    for wrong in (values[:2], torch.tensor([1.0, math.nan, -math.inf]), -values, values.abs()):
        with pytest.raises(AssertionError, match="times as far apart"):
            rounding.check(wrong, values)
    with pytest.raises(AssertionError):
        rounding.check(torch.ones(3), torch.zeros(3))
