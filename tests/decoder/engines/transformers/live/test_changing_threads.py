"""A model that another thread changes while it generates: nothing crashes, and nothing is kept."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from decoder.errors import ModelChangedError
from decoder.model.capability_check import FoundHere
from decoder.model.stamp import undisturbed
from decoder.model.target import Target
from tests.decoder.engines.transformers.live.model_changes import tiny
from tests.decoder.engines.transformers.live.test_live_model import drafting, written


@contextmanager
def changing(change: Callable[[int], None]) -> Iterator[Counter[str]]:
    """Call a function with the next number, again and again, in another thread."""
    is_over = threading.Event()
    counts: Counter[str] = Counter()

    def run() -> None:
        while not is_over.is_set():
            change(counts["changes"])
            counts["changes"] += 1

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield counts
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)


def restless(model: Any) -> Callable[[int], None]:
    """Return what exchanges, adds and removes modules and hooks, and writes to weights."""
    layers = model.model.layers
    mlps = layers[1].mlp, tiny().model.layers[1].mlp

    @torch.no_grad()
    def change(number: int) -> None:
        for factor in (2.0, 0.5):
            for weight in model.parameters():
                weight.mul_(factor)
            layers[0].self_attn.q_proj.weight.data.mul_(factor)
        layers[1].mlp = mlps[number % 2]
        layers[0].register_forward_hook(lambda *_: None).remove()
        layers[0].add_module(f"extra{number % 3}", nn.Identity())
        layers[0]._modules.pop(f"extra{(number + 1) % 3}", None)

    return change


def test_nothing_crashes_and_nothing_is_kept_of_it() -> None:
    model = tiny()
    truth = written(model)
    plugin = drafting(model, truth)
    own_mlp = model.model.layers[1].mlp
    with changing(restless(model)) as counts:
        for _ in range(3):
            try:
                assert len(written(model, custom_generate=plugin)) == len(truth)
            except ModelChangedError:
                counts["refused"] += 1
    assert counts["changes"] > counts["refused"]
    model.model.layers[1].mlp = own_mlp
    for number in range(3):
        model.model.layers[0]._modules.pop(f"extra{number}", None)
    assert written(model, custom_generate=plugin) == truth
    before = plugin.statistics.num_passes
    assert written(model, custom_generate=plugin) == truth
    assert plugin.statistics.num_passes - before < len(truth) / 2  # and drafts are accepted


def test_a_verdict_of_a_model_that_changed_meanwhile_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny()
    verdicts = FoundHere()
    forward = model.forward

    def moving(*args: Any, **options: Any) -> Any:
        with torch.no_grad():
            model.lm_head.weight.add_(0.25)
        return forward(*args, **options)

    monkeypatch.setattr(
        type(model), "forward", lambda _, *args, **options: moving(*args, **options)
    )
    with pytest.raises(Exception, match="differs from generate"):
        Target(model, verdicts=verdicts)
    monkeypatch.undo()
    assert verdicts.verdict_on(model) is None
    assert Target(model, verdicts=verdicts).reason == ""
    assert verdicts.verdict_on(model) is not None


def test_a_look_that_is_disturbed_is_taken_again() -> None:
    tables = [{1: 1, 2: 2}]

    def look() -> int:
        total = 0
        for key in tables[0]:
            total += key
            if len(tables[0]) < 5:
                tables[0][len(tables[0]) + 1] = 0
        return total

    assert undisturbed(look) == 15

    def failing() -> None:
        raise RuntimeError("not of a table")

    with pytest.raises(RuntimeError, match="not of a table"):
        undisturbed(failing)
