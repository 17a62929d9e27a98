"""Checking on a few tokens what a model's configuration promises: trees, chains, plain passes.

A target reads a few tokens, verifies a small bushy tree, commits a path that moves rows, and goes
on. The logits of every row must be those that the model gives by itself, in one ordinary pass over
all paths of the tree, each as a sequence of its own. What is decoded plainly must have the logits
of `generate`.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from decoder.errors import OutOfMemoryError
from decoder.model.compatibility import Capability, num_embeddings, position_limit
from decoder.model.passes import is_out_of_memory
from decoder.model.stamp import Structure
from decoder.model.user_model import cache_argument
from indexer.errors import reason_of
from retriever.drafter import TokenIds
from retriever.tree import ROOT, DraftTree, Source

_NUM_TRIALS: Final = 3
"""In half precision a difference counts if it shows with so many choices of tokens: an expert that
is barely chosen in one pass and not in the other makes one look wrong that is right."""

_FULL: Final = (torch.float32, torch.float64)

_FLOORS: Final = {
    torch.float64: 1e-4,  # attention's softmax is single precision in some models
    torch.float32: 1e-3,
    torch.float16: 0.03,
    torch.bfloat16: 0.12,
}
"""Relative differences of logits that are taken for rounding, by precision; see the decision."""

_BARRED: Final = 1e6
"""Logits of this size mean that a model bars a token."""

_CEILING: Final = 0.3
"""No spread of a model's own passes excuses more than this."""

_SPREAD_FACTOR: Final = 4.0
_NEAR_CONTEXT: Final = 4
_LONGEST_WINDOW: Final = 64
"""Windows up to this are crossed by reading as well as by pretending: reading takes long."""

_FARTHEST: Final = 2048
"""Most tokens that are pretended: windows beyond it are taken from the configuration."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a model was found to verify.

    Attributes:
        capability: which drafts; `None` where not even plain passes are those of the model.
        reason: what was wrong with the next better passes, for users; empty where nothing was.
    """

    capability: Capability | None
    reason: str = ""


class Verdicts(Protocol):
    """Keeps verdicts from one start to the next."""

    def verdict_on(self, model: PreTrainedModel) -> Verdict | None:
        """Return the verdict kept for models like this one, `None` where there is none."""
        ...

    def keep_verdict(self, model: PreTrainedModel, verdict: Verdict) -> None:
        """Keep a verdict; where that fails it is found again at the next start."""
        ...


_MOST_KEPT: Final = 8
"""Verdicts that are kept of a model: it is trained and run in turn, or adapters come and go."""


class FoundHere:
    """Keeps verdicts for as long as their models are there, by what they were made of."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[PreTrainedModel, list[tuple[Structure, Verdict]]]
        self._found = WeakKeyDictionary()

    def verdict_on(self, model: PreTrainedModel) -> Verdict | None:
        """See `Verdicts`."""
        now = Structure.of(model)
        latest_first = reversed(self._found.get(model, []))
        return next((verdict for before, verdict in latest_first if now.is_of(before)), None)

    def keep_verdict(self, model: PreTrainedModel, verdict: Verdict) -> None:
        """See `Verdicts`."""
        kept = self._found.setdefault(model, [])
        kept.append((Structure.of(model), verdict))
        del kept[:-_MOST_KEPT]


FOUND_HERE: Final[Verdicts] = FoundHere()


class Checked(Protocol):
    """What is checked: a target's face, as the decoding loop uses it."""

    def prefill(self, prompt: TokenIds) -> torch.Tensor:
        """Read a prompt; return [1, vocabulary]."""
        ...

    def verify(self, last_token: int, tree: DraftTree) -> torch.Tensor:
        """Read a token and a tree; return [1 + nodes, vocabulary]."""
        ...

    def commit(self, path: NDArray[np.int64]) -> None:
        """Keep a path of the tree."""
        ...

    def pretend_marked(self, num_tokens: int, marked: NDArray[np.int64]) -> bool:
        """Make up a sequence whose tokens `marked` stand out; return whether that is possible."""
        ...

    def drop(self, num_tokens: int) -> None:
        """Take the last committed tokens back."""
        ...


class CannotCheckError(Exception):
    """The model does not run by itself on plain tokens, or memory is out: nothing is known."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether a lack of memory is the cause."""
        return self.__cause__ is not None and is_out_of_memory(self.__cause__)


def find_verdict(
    model: PreTrainedModel, promised: Capability, made: Callable[[Capability], Checked]
) -> Verdict:
    """Find out what a model verifies exactly, at most what its configuration promises.

    Args:
        model: in evaluation mode, as transformers runs it.
        promised: what to begin with.
        made: makes a target of the model that verifies so much.

    Raises:
        CannotCheckError: there is nothing to compare with.
    """
    reason = ""
    for capability in sorted(Capability, reverse=True):
        if capability > promised:
            continue
        target = made(capability)
        try:
            wrong = _wrong(model, capability, target)
        except CannotCheckError as error:
            if capability is Capability.PLAIN or error.is_out_of_memory:
                raise
            wrong = f"it does not read whole sequences by itself: {error}"
        if not wrong:
            return Verdict(capability, reason)
        reason = wrong
    return Verdict(None, reason)


def _wrong(model: PreTrainedModel, capability: Capability, target: Checked) -> str:
    """Return what is wrong with the passes of a target, empty where nothing is.

    Raises:
        CannotCheckError: see `find_verdict`.
    """
    wrong = ""
    for trial in range(num_trials(model.dtype)):
        compared = _CHECKS[capability](model, target, np.random.default_rng(trial))
        try:
            wrong = next((each.name for each in compared if each.is_wrong(model.dtype)), "")
        except (CannotCheckError, OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  each model raises its own
            return f"a pass fails: {reason_of(error)}"
        if not wrong:
            return ""
    return wrong


@dataclass(frozen=True, slots=True)
class _Compared:
    """Rows of one pass beside those of the model.

    Attributes:
        name: what is wrong if they differ.
        errors: relative differences of the rows, rising. In half precision the lower median
            counts: a wrong mask, position or cache shows in most rows, an expert that is chosen
            differently in few. In full precision, where that does not happen, the largest counts.
        spread: the difference that the model's own passes of different widths have.
        is_repeated: whether both are passes of one shape, which round alike: four times less is
            taken for rounding.
    """

    name: str
    errors: list[float]
    spread: float = 0.0
    is_repeated: bool = False

    def is_wrong(self, dtype: torch.dtype) -> bool:
        floor = _FLOORS.get(dtype, _FLOORS[torch.float32])
        spread = max(floor, min(_SPREAD_FACTOR * self.spread, _CEILING))
        limit = floor / 4 if self.is_repeated else spread
        counted = -1 if dtype in _FULL else (len(self.errors) - 1) // 2
        return not self.errors[counted] <= limit  # neither are values that are no numbers


def num_trials(dtype: torch.dtype) -> int:
    """Return with how many choices of tokens a difference must show before it counts."""
    return 1 if dtype in _FULL else _NUM_TRIALS


def agree(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two passes over the same tokens give the same logits, up to rounding.

    Args:
        rows: [n, vocabulary].
        expected: [n, vocabulary].
    """
    compared = _Compared("", _differences(rows, expected))
    return not compared.is_wrong(expected.dtype)


def _differences(rows: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Return ||row - expected|| / ||expected - its mean|| of rows [n, V], rising.

    Logits that a model bars (minus infinity, or near it) are left out.
    """
    sound = _is_sound(expected)
    expected = expected.double().where(sound, 0.0)
    errors = (rows.to(expected.device).double().where(sound, 0.0) - expected).norm(dim=-1)
    scale = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    relative = (errors / scale.clamp_min(1e-30)).nan_to_num(nan=torch.inf)
    return sorted(relative.tolist())


def _is_sound(logits: torch.Tensor) -> torch.Tensor:
    return logits.isfinite() & (logits.abs() < _BARRED)


_PARENTS: Final = (ROOT, ROOT, 0, 1)
"""A forked tree: two children of the root, and a child of each."""
_MOVED: Final = np.array([1, 3], np.int64)
"""A path of it whose rows do not lie where they are kept."""
_ASIDE: Final = slice(2, None)
"""Rows of it that do not lie where they stand: a window that is counted by slots shows in them."""
_PAST_WINDOW: Final = 2
_EDGE: Final = np.arange(_PAST_WINDOW + 1, _PAST_WINDOW + 4)
"""Behind a context so much longer than a window, the first tokens that depths 0, 1 and 2 see."""


@dataclass(frozen=True, slots=True)
class _Script:
    """The tokens of one trial.

    Attributes:
        prompt: int32[n].
        last: the token before the tree.
        nodes: int32[4], the tree's, see `_PARENTS`.
        after: the token behind the path that is committed.
        others: int32[2], tokens that the model itself is not shown.
    """

    prompt: TokenIds
    last: int
    nodes: TokenIds
    after: int
    others: TokenIds

    @classmethod
    def drawn(cls, model: PreTrainedModel, length: int, rng: np.random.Generator) -> "_Script":
        """Draw tokens; those behind the prompt differ where the vocabulary allows."""
        size = num_embeddings(model)
        allowed = np.setdiff1d(np.arange(size, dtype=np.int32), _special_ids(model.config))
        prompt = rng.choice(allowed, length)
        count = len(_PARENTS) + 4
        drawn = np.resize(rng.permutation(allowed), count)  # siblings differ if two tokens do
        return cls(prompt, int(drawn[0]), drawn[1:5], int(drawn[5]), drawn[6:])

    def sequences(self) -> NDArray[np.int64]:
        """Return int64[2, n + 4]: prompt, last token, each path of the tree, what follows."""
        one, two, below_one, below_two = self.nodes
        paths = ((one, below_one), (two, below_two))
        rows = [[*self.prompt, self.last, *path, self.after] for path in paths]
        return np.array(rows, np.int64)


def _special_ids(config: PreTrainedConfig) -> list[int]:
    """Return the tokens that a configuration names: some models treat them differently."""
    stated = [*config.to_dict().items(), *config.get_text_config(decoder=True).to_dict().items()]
    return [
        each
        for name, value in stated
        if name.endswith(("token_id", "token_index"))
        for each in (value if isinstance(value, list) else [value])
        if isinstance(each, int)
    ]


def _windows(config: PreTrainedConfig) -> list[int]:
    """Return all numbers that a configuration calls windows or chunks."""
    stated = config.get_text_config(decoder=True).to_dict()
    return sorted(
        {
            value
            for name, value in stated.items()
            if any(word in name for word in ("window", "chunk"))
            and not any(word in name for word in ("layer", "pattern"))  # these count layers
            and type(value) is int
            and value > 1
        }
    )


def _draft(nodes: TokenIds, parents: tuple[int, ...]) -> DraftTree:
    probabilities = np.linspace(0.9, 0.5, len(nodes))
    return DraftTree.checked(nodes, parents, probabilities, np.full(len(nodes), Source.MODEL))


@dataclass(frozen=True, slots=True)
class _Own:
    """What the model gives by itself for a script.

    Attributes:
        rows: [2, 5, vocabulary], of one ordinary pass over `_Script.sequences`: the logits after
            the prompt, the last token, the path's two nodes, and what follows.
        first: [1, vocabulary], after the prompt; in half precision of a pass over it alone.
        spread: the difference of both, which is rounding: one pass is wider than the other.
    """

    rows: torch.Tensor
    first: torch.Tensor
    spread: float


def _asked(model: PreTrainedModel, script: _Script) -> _Own:
    """Have a model read a script by itself.

    Raises:
        CannotCheckError: it cannot.
    """
    try:
        tokens = torch.from_numpy(script.sequences()).to(model.device)
        read = _read_in_steps if _drops_tokens(model, tokens.shape[1]) else _read
        rows = read(model, tokens)[:, -5:]
        first = rows[:1, 0]
        if model.dtype not in _FULL:  # there, rounding is far below what is taken for it
            first = _read(model, tokens[:1, : len(script.prompt)])[:, -1]
    except Exception as error:  # each model raises its own
        raise CannotCheckError(reason_of(error)) from error
    _refuse_unsound(rows)
    return _Own(rows, first, _differences(first, rows[:1, 0])[0])


def _read(
    model: PreTrainedModel, tokens: torch.Tensor, start: int = 0, cache: DynamicCache | None = None
) -> torch.Tensor:
    """Return the logits of sequences, int64[rows, n], behind `start` tokens that a cache holds.

    Positions are told as `generate` tells them: some models begin elsewhere by themselves.
    """
    options: dict[str, Any] = {} if cache is None else {cache_argument(model): cache}
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        options["position_ids"] = positions.expand_as(tokens)
    logits: torch.Tensor = model(input_ids=tokens, **options).logits
    return logits


def _drops_tokens(model: PreTrainedModel, length: int) -> bool:
    """Return whether a model's own cache does not hold a sequence of this length."""
    layers = DynamicCache(config=model.config).layers
    sliding = [each for each in layers if isinstance(each, DynamicSlidingWindowLayer)]
    return any(each.sliding_window < length for each in sliding)


def _read_in_steps(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the last logits of sequences, int64[rows, n], read as `generate` reads them.

    Moshi has a window in its cache alone: in one pass, a token sees all before it.
    """
    cache, length = DynamicCache(config=model.config), tokens.shape[1]
    start = length - 4
    logits = [_read(model, tokens[:, :start], 0, cache)[:, -1:]]
    logits += [_read(model, tokens[:, at : at + 1], at, cache) for at in range(start, length)]
    return torch.cat(logits, dim=1)


def _refuse_unsound(logits: torch.Tensor) -> None:
    """Raise CannotCheckError where a row of a model's own logits holds no numbers."""
    if not _is_sound(logits).any(dim=-1).all():
        raise CannotCheckError("its logits are not numbers")


def _generated(
    model: PreTrainedModel, prompt: TokenIds, num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that `generate` chooses, and their rows of logits, [n, vocabulary]."""
    config = GenerationConfig(  # type: ignore[no-untyped-call]  # not typed there
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    generate: Any = model.generate
    tokens = torch.from_numpy(prompt.astype(np.int64))[None].to(model.device)
    output = generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


def _near_context(model: PreTrainedModel) -> int:
    """Return the length of a prompt that crosses the short windows."""
    short = [window for window in _windows(model.config) if window <= _LONGEST_WINDOW]
    limit = position_limit(model.config)
    length = max([_NEAR_CONTEXT, *(window + 2 for window in short)])
    return length if limit is None else max(1, min(length, limit - 6))


def _trees(
    model: PreTrainedModel, target: Checked, rng: np.random.Generator
) -> Iterator[_Compared]:
    script = _Script.drawn(model, _near_context(model), rng)
    own = _asked(model, script)
    first = target.prefill(script.prompt)
    yield _Compared("reads a prompt differently", _differences(first, own.first), own.spread)
    rows = target.verify(script.last, _draft(script.nodes, _PARENTS))
    one, two = own.rows
    expected = torch.stack([one[1], one[2], two[2], one[3], two[3]])
    name = "tokens of a tree see others than their own path, or stand elsewhere"
    yield _Compared(name, _differences(rows, expected), own.spread)
    if model.dtype not in _FULL:  # there, rounding is too small to hide anything
        yield _siblings(target, script, rows)
    target.commit(_MOVED)
    rows = target.verify(script.after, _draft(script.others, (ROOT, 0)))
    name = "its cache does not keep a path of a tree"
    yield _Compared(name, _differences(rows[:1], two[4:]), own.spread)
    yield from _far_trees(model, target, script)


def _siblings(target: Checked, script: _Script, rows: torch.Tensor) -> _Compared:
    """Compare a pass with one whose other branch, which these rows do not see, differs."""
    others = script.nodes.copy()
    others[[0, 2]] = script.others
    again = target.verify(script.last, _draft(others, _PARENTS))
    unseen = [0, 2, 4]
    name = "tokens of a tree see their siblings"
    return _Compared(name, _differences(again[unseen], rows[unseen]), is_repeated=True)


def _far_trees(model: PreTrainedModel, target: Checked, script: _Script) -> Iterator[_Compared]:
    """Compare a tree with single tokens behind a context that is longer than the windows."""
    windows = [each for each in _windows(model.config) if each <= _FARTHEST]
    limit = position_limit(model.config)
    for window in windows:
        length = window + _PAST_WINDOW
        if limit is not None and length + 4 > limit:
            continue
        if not target.pretend_marked(length, _EDGE):
            return
        rows = target.verify(script.last, _draft(script.nodes, _PARENTS))
        expected = _singly(target, script)
        name = f"a tree behind its window of {window} sees others"
        yield _Compared(name, _differences(rows[_ASIDE], expected[_ASIDE]))


def _singly(target: Checked, script: _Script) -> torch.Tensor:
    """Return the rows of the forked tree, [5, vocabulary], from passes of one token each."""
    empty, stay = DraftTree.empty(), np.zeros(0, np.int64)
    found: list[torch.Tensor] = []
    one, two, below_one, below_two = script.nodes.tolist()
    root = target.verify(script.last, empty)
    target.commit(stay)
    for node, below in ((one, below_one), (two, below_two)):
        found.append(target.verify(node, empty))
        target.commit(stay)
        found.append(target.verify(below, empty))
        target.drop(1)
    first, below_first, second, below_second = found
    return torch.cat([root, first, second, below_first, below_second])


def _chains(
    model: PreTrainedModel, target: Checked, rng: np.random.Generator
) -> Iterator[_Compared]:
    script = _Script.drawn(model, _near_context(model), rng)
    own = _asked(model, script)
    first = target.prefill(script.prompt)
    yield _Compared("reads a prompt differently", _differences(first, own.first), own.spread)
    chain = np.append(script.nodes[[1, 3]], script.others[:1])
    rows = target.verify(script.last, _draft(chain, (ROOT, 0, 1)))
    name = "tokens of a chain see others than those before them"
    yield _Compared(name, _differences(rows[:3], own.rows[1, 1:4]), own.spread)
    target.commit(np.arange(2))
    rows = target.verify(script.after, _draft(script.others[1:], (ROOT,)))
    name = "its cache does not give up rejected tokens"
    yield _Compared(name, _differences(rows[:1], own.rows[1, 4:]), own.spread)


def _plain(
    model: PreTrainedModel, target: Checked, rng: np.random.Generator
) -> Iterator[_Compared]:
    for length in (_near_context(model), 1):
        script = _Script.drawn(model, length, rng)
        try:
            tokens, expected = _generated(model, script.prompt, 3)
        except Exception as error:  # each model raises its own
            raise CannotCheckError(reason_of(error)) from error
        _refuse_unsound(expected)
        rows = [target.prefill(script.prompt)]
        for token in tokens[:2]:
            rows.append(target.verify(token, DraftTree.empty()))
            target.commit(np.zeros(0, np.int64))
        yield _Compared(
            "decoded token by token it differs from generate",
            _differences(torch.cat(rows), expected),
        )


_CHECKS: Final = {Capability.TREES: _trees, Capability.CHAINS: _chains, Capability.PLAIN: _plain}
