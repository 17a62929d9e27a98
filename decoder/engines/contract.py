"""Checks whether the installed version of an engine offers what its adapter needs.

An adapter calls an engine's own functions, and the engine calls the adapter. Before the first
request, each adapter compares both with what it was written for. If a version changed them, it is
refused with a message that says what changed:

    check_contract(
        ("llama-cpp-python",),
        TESTED_VERSIONS,
        [
            *differences(LlamaDraftModel, implemented_by=DrafterDraftModel),
            *differences(Llama, attributes=("n_vocab", "reset")),
            *differences(Llama.eval, passed=1),
        ],
    )
"""

import inspect
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, Signature
from typing import Any, Final

from decoder.errors import UnsupportedEngineError

UNKNOWN_VERSION: Final = "of an unknown version"

_POSITIONAL: Final = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED: Final = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def installed(distributions: Iterable[str]) -> tuple[str, str]:
    """Return the name of an engine's distribution, and its version.

    Args:
        distributions: names under which the engine may be installed, at least one; the first name
            found counts.
    """
    names = list(distributions)
    for name in names:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return names[0], UNKNOWN_VERSION


def check_contract(distributions: Iterable[str], tested: str, found: Iterable[str]) -> None:
    """Refuse an engine that differs from what its adapter needs.

    Args:
        distributions: see `installed`.
        tested: versions that the adapter was tested with, such as `>=5.0,<6`.
        found: the differences, each a sentence without a full stop; see `differences`.

    Raises:
        UnsupportedEngineError: there is a difference; the message names it and says what to do.
    """
    sentences = list(dict.fromkeys(found))
    if not sentences:
        return
    name, its_version = installed(distributions)
    raise UnsupportedEngineError(
        f"{name} {its_version} does not offer what drafts need: "
        f"{'; '.join(sentences)}: install {name} {tested}, with which drafts were tested, or a "
        "newer foredraft"
    )


def differences(  # noqa: PLR0913  (each aspect is an option, given by name)
    thing: Any,
    *,
    attributes: Iterable[str] = (),
    parameters: Iterable[str] = (),
    passed: int | None = None,
    named: Iterable[str] = (),
    implemented_by: type | None = None,
    called: str | None = None,
) -> list[str]:
    """Return how an engine's class, function or object differs from what an adapter needs.

    Args:
        thing: the part of the engine; `None` if it was not found.
        attributes: attributes that it must have: an object's own attributes, or those that a class
            shows for itself and its instances.
        parameters: parameters that a function must name explicitly, because it silently accepts any
            names.
        passed: number of arguments that the adapter passes by position, without `self`; `None` if
            the adapter does not call it.
        named: names of the arguments that the adapter passes by name, if it calls it.
        implemented_by: the adapter's subclass of an engine's class. The subclass must implement all
            abstract methods, and each method that both classes define must accept the arguments of
            the engine's signature.
        called: name of the part in the sentences; its own name if not given.

    Returns:
        A sentence for each difference, without a full stop; empty if there are none. What cannot be
        inspected, such as the arguments of a compiled function, counts as equal.
    """
    shown = called or _name_of(thing)
    if thing is None:
        return [f"{shown} is not there"]
    found = [f"{shown} has no `{each}`" for each in attributes if not hasattr(thing, each)]
    if parameters:
        known = {each.name for each in _own_parameters(thing) or ()}
        found += [f"{shown} has no parameter `{each}`" for each in parameters if each not in known]
    if passed is not None or named:
        found += _call_differences(thing, passed or 0, list(named), shown)
    if implemented_by is not None:
        found += _hook_differences(thing, implemented_by, shown)
    return found


def _name_of(thing: Any) -> str:
    return str(getattr(thing, "__qualname__", None) or type(thing).__qualname__)


def _signature(thing: Any) -> Signature | None:
    """Return a callable's signature; `None` if it cannot be inspected."""
    try:
        return inspect.signature(thing)
    except (TypeError, ValueError):
        return None


def _own_parameters(thing: Any) -> list[Parameter] | None:
    """Return the parameters of a callable, without `self`."""
    signature = _signature(thing)
    if signature is None:
        return None
    parameters = list(signature.parameters.values())
    if inspect.isfunction(thing) and parameters and parameters[0].name == "self":
        return parameters[1:]
    return parameters


def _call_differences(thing: Any, num_passed: int, named: list[str], shown: str) -> list[str]:
    """Return the reasons why a call with these arguments would fail."""
    if not callable(thing):
        return [f"{shown} can no longer be called"]
    parameters = _own_parameters(thing)
    if parameters is None:
        return []
    kinds = {each.kind for each in parameters}
    positional = [each for each in parameters if each.kind in _POSITIONAL]
    found = []
    if num_passed > len(positional) and Parameter.VAR_POSITIONAL not in kinds:
        found.append(
            f"{shown} takes {len(positional)} arguments by position, and the adapter passes "
            f"{num_passed}"
        )
    filled = {each.name for each in positional[:num_passed]}
    taken = {each.name for each in parameters if each.kind in _NAMED} - filled
    if Parameter.VAR_KEYWORD not in kinds:
        found += [f"{shown} takes no `{each}`" for each in named if each not in taken]
    found += [
        f"{shown} needs `{each.name}`, which the adapter does not pass"
        for each in parameters
        if each.kind in (*_POSITIONAL, Parameter.KEYWORD_ONLY)
        and each.default is Parameter.empty
        and each.name not in filled
        and each.name not in named
    ]
    return found


def _hook_differences(base: type, ours: type, shown: str) -> list[str]:
    """Return the differences between an engine's abstract class and the adapter's subclass."""
    lacking = getattr(base, "__abstractmethods__", frozenset[str]()) & getattr(
        ours, "__abstractmethods__", frozenset[str]()
    )
    found = [f"{shown} demands a method `{each}`" for each in sorted(lacking)]
    for name in sorted(_methods(base) & _methods(ours)):
        theirs, own = _own_parameters(getattr(base, name)), _own_parameters(getattr(ours, name))
        if theirs is not None and own is not None:
            found += _calls_of_hook(theirs, own, f"{shown}.{name}")
    return found


def _methods(owner: type) -> set[str]:
    """Return the names of the methods that a class itself defines, without its constructor."""
    own = {name for name, value in vars(owner).items() if inspect.isfunction(value)}
    return own - {"__init__"}


def _calls_of_hook(theirs: list[Parameter], own: list[Parameter], shown: str) -> list[str]:
    """Return how an engine's calls of a method differ from what the adapter's method accepts."""
    places = [each for each in own if each.kind in _POSITIONAL]
    takes_any = {each.kind for each in own}
    names = {each.name for each in own if each.kind in _NAMED}
    found: list[str] = []
    filled: set[str] = set()
    for at, each in enumerate(each for each in theirs if each.kind in _POSITIONAL):
        place = places[at] if at < len(places) else None
        if place is not None:
            filled.add(place.name)
        by_name = each.kind in _NAMED and (each.name in names or Parameter.VAR_KEYWORD in takes_any)
        if place is None and not by_name and Parameter.VAR_POSITIONAL not in takes_any:
            found.append(f"{shown} has a new parameter `{each.name}`")
        elif place is not None and each.kind in _NAMED and place.kind in _NAMED and not by_name:
            found.append(f"{shown} gives `{each.name}` in the place of `{place.name}`")
    if Parameter.VAR_KEYWORD not in takes_any:
        found += [
            f"{shown} has a new parameter `{each.name}`"
            for each in theirs
            if each.kind is Parameter.KEYWORD_ONLY and each.name not in names
        ]
    filled |= {each.name for each in theirs}
    return found + [
        f"{shown} is no longer given `{each.name}`"
        for each in own
        if each.kind in (*_POSITIONAL, Parameter.KEYWORD_ONLY)
        and each.default is Parameter.empty
        and each.name not in filled
    ]
