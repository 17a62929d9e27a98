"""A changed engine is refused with what changed."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest

from decoder.engines import contract
from decoder.engines.contract import check_contract, differences
from decoder.errors import UnsupportedEngineError


class Drafts(ABC):
    """An engine's abstract class."""

    @abstractmethod
    def propose(self, tokens: Any, lengths: Any, *, seed: int = 0) -> Any: ...

    def load(self, path: str) -> None:
        raise NotImplementedError


class Ours(Drafts):
    def propose(self, tokens: Any, lengths: Any, *, seed: int = 0) -> Any:
        return tokens, lengths, seed

    def load(self, path: str) -> None: ...


def changed(propose: Callable[..., Any], **more: Callable[..., Any]) -> type:
    """Return the abstract class of another version."""
    methods = {"propose": abstractmethod(propose), **more}
    return type("Drafts", (ABC,), methods)


def ours_of(base: type) -> type:
    return type("Ours", (base,), {"propose": Ours.propose, "load": Ours.load})


def test_the_version_that_an_adapter_was_written_for_has_no_differences() -> None:
    assert differences(Drafts, implemented_by=Ours, attributes=("propose", "load")) == []
    assert differences(Drafts.propose, passed=2, named=["seed"]) == []
    check_contract(("numpy",), ">=1", [])


def later_parameter(self: Any, tokens: Any, lengths: Any, states: Any, *, seed: int = 0) -> Any: ...
def later_name(self: Any, tokens: Any, lengths: Any, *, seed: int = 0, mask: Any = None) -> Any: ...
def renamed(self: Any, tokens: Any, num_tokens: Any, *, seed: int = 0) -> Any: ...
def fewer(self: Any, tokens: Any, *, seed: int = 0) -> Any: ...
def without_seed(self: Any, tokens: Any, lengths: Any) -> Any: ...


@pytest.mark.parametrize(
    ("propose", "sentences"),
    [
        (later_parameter, ["Drafts.propose has a new parameter `states`"]),
        (later_name, ["Drafts.propose has a new parameter `mask`"]),
        (renamed, ["Drafts.propose gives `num_tokens` in the place of `lengths`"]),
        (fewer, ["Drafts.propose is no longer given `lengths`"]),
        (without_seed, []),  # ours has a default
    ],
)
def test_a_hook_that_is_called_otherwise_is_told(
    propose: Callable[..., Any], sentences: list[str]
) -> None:
    base = changed(propose)
    assert differences(base, implemented_by=ours_of(base)) == sentences


def test_a_method_that_becomes_abstract_is_told() -> None:
    base = changed(Drafts.propose, finish=abstractmethod(Engine.reset))
    found = differences(base, implemented_by=ours_of(base))
    assert found == ["Drafts demands a method `finish`"]


def test_hooks_that_take_anything_take_new_parameters() -> None:
    base = changed(later_parameter)

    class Lenient(base):  # type: ignore[misc, valid-type]  # a base that is made at run time
        def propose(self, tokens: Any, /, *more: Any, **named: Any) -> Any: ...

    assert differences(base, implemented_by=Lenient) == []


class Engine:
    def reset(self) -> None: ...

    def run(self, tokens: Any, width: int, *, mode: str) -> Any: ...

    def later(self, *tokens: Any, **options: Any) -> Any: ...


def test_what_an_adapter_calls_is_compared_with_how_it_calls_it() -> None:
    assert differences(Engine, attributes=("reset", "eval")) == ["Engine has no `eval`"]
    assert differences(Engine.run, passed=2, named=["mode"]) == []
    assert differences(Engine().run, passed=2, named=["mode"]) == []
    assert differences(Engine.run, passed=2) == [
        "Engine.run needs `mode`, which the adapter does not pass"
    ]
    assert differences(Engine.reset, passed=1) == [
        "Engine.reset takes 0 arguments by position, and the adapter passes 1"
    ]
    assert differences(Engine.run, passed=2, named=["mode", "seed"]) == [
        "Engine.run takes no `seed`"
    ]
    assert differences(Engine.run, passed=2, named=["width", "mode"]) == [
        "Engine.run takes no `width`"
    ]
    assert differences(Engine.later, passed=5, named=["anything"]) == []
    assert differences(Engine.later, parameters=["anything"]) == [
        "Engine.later has no parameter `anything`"
    ]
    assert differences(Engine.run, parameters=["mode"]) == []
    assert differences("text", passed=1, called="Engine.run") == [
        "Engine.run can no longer be called"
    ]


def test_what_cannot_be_seen_is_no_difference() -> None:
    assert differences(min, passed=9) == []


def test_a_refusal_names_version_change_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "version", lambda _: "9.1")
    with pytest.raises(UnsupportedEngineError) as caught:
        check_contract(("engine",), ">=8,<9", ["Engine has no `eval`", "Engine has no `eval`"])
    assert str(caught.value) == (
        "engine 9.1 does not offer what drafts need: Engine has no `eval`: install "
        "engine >=8,<9, with which drafts were tested, or a newer foredraft"
    )
