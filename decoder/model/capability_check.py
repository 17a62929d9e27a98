"""Checks on a few tokens whether a model verifies trees, chains, or only plain passes exactly.

All three checks follow the same script: a target reads a prompt, verifies a small draft, commits a
path of it, and continues from there. A chain is a tree with one child per node, and plain passes
have drafts without nodes. The logits of every row must match the model's own logits. For drafts,
the model's own logits come from an ordinary pass over each path as a separate sequence. For plain
passes, they come from `generate`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from decoder.errors import OutOfMemoryError
from decoder.model.compatibility import Capability, num_embeddings, position_limit
from decoder.model.passes import is_out_of_memory
from decoder.model.stamp import Structure
from decoder.model.user_model import taken_by
from indexer.errors import reason_of
from retriever.drafter import TokenIds
from retriever.tree import ROOT, DraftTree, Source

_NUM_TRIALS: Final = 3
"""In half precision a difference counts only if it shows with this many choices of tokens. If an
expert is barely chosen in one pass but not in the other, even correct passes differ."""

_FULL: Final = (torch.float32, torch.float64)

_FLOORS: Final = {
    torch.float64: 1e-4,  # some models compute the softmax of attention in single precision
    torch.float32: 1e-3,
    torch.float16: 0.03,
    torch.bfloat16: 0.12,
}
"""Relative differences of logits that count as rounding, by dtype; see docs/decisions."""

_BARRED: Final = 1e6
"""A negative logit of at least this absolute size means that the model forbids the token."""

_CEILING: Final = 0.3
"""Largest difference that counts as rounding, even if the model's own passes differ more."""

_SPREAD_FACTOR: Final = 4.0
_REPEATED: Final = 1 / 4
"""Share of the dtype's rounding limit that is allowed between passes of the same shape, because
these round alike."""

_NEAR_CONTEXT: Final = 4
_LONGEST_WINDOW: Final = 64
"""Longest window that the check also exceeds by actually reading tokens; for longer windows that
would be slow."""

_FARTHEST: Final = 2048
"""Most tokens to make up; if a window is larger, the configuration is trusted."""

_PAST_WINDOW: Final = 2
_EDGE: Final = np.arange(_PAST_WINDOW + 1, _PAST_WINDOW + 4)
"""The first tokens that rows at depths 0, 1 and 2 see, if the context is longer than a window by
`_PAST_WINDOW`."""


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """Which drafts a model was found to verify exactly.

    Attributes:
        capability: the most general drafts that are exact; `None` if not even plain passes match
            the model.
        reason: what was wrong with more general drafts, for users; empty if nothing.
    """

    capability: Capability | None
    reason: str = ""


class Verdicts(Protocol):
    """A store of verdicts that outlives the process."""

    def verdict_on(self, model: PreTrainedModel) -> ModelVerdict | None:
        """Return the stored verdict for models like this one, or `None`."""
        ...

    def keep_verdict(self, model: PreTrainedModel, verdict: ModelVerdict) -> None:
        """Store a verdict; if that fails, the next start checks the model again."""
        ...


_MOST_KEPT: Final = 8
"""Verdicts stored per model: a model may alternate between training and inference, or switch
adapters."""


class FoundHere:
    """Stores verdicts in memory while their models exist, by the models' structure."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[PreTrainedModel, list[tuple[Structure, ModelVerdict]]]
        self._found = WeakKeyDictionary()

    def verdict_on(self, model: PreTrainedModel) -> ModelVerdict | None:
        """Implement `Verdicts`."""
        now = Structure.of(model)
        latest_first = reversed(self._found.get(model, []))
        return next((verdict for before, verdict in latest_first if now.is_of(before)), None)

    def keep_verdict(self, model: PreTrainedModel, verdict: ModelVerdict) -> None:
        """Implement `Verdicts`."""
        kept = self._found.setdefault(model, [])
        kept.append((Structure.of(model), verdict))
        del kept[:-_MOST_KEPT]


FOUND_HERE: Final[Verdicts] = FoundHere()


class Checked(Protocol):
    """The interface that is checked: a target as the decoding loop uses it."""

    def prefill(self, prompt: TokenIds) -> torch.Tensor:
        """Read a prompt, int32[n]; return [1, vocabulary], the logits after it."""
        ...

    def verify(self, last_token: int, tree: DraftTree) -> torch.Tensor:
        """Read a token and a tree; return [1 + nodes, vocabulary], the logits after each."""
        ...

    def commit(self, path: NDArray[np.int64]) -> None:
        """Keep the token and a path of the tree, int64[k]."""
        ...

    def pretend_marked(self, num_tokens: int, marked: NDArray[np.int64]) -> bool:
        """Fake a sequence in which tokens `marked` stand out; return whether that is possible."""
        ...

    def drop(self, num_tokens: int) -> None:
        """Undo the last committed tokens."""
        ...


class CannotCheckError(Exception):
    """No verdict is possible: the model itself does not run on plain tokens, or memory ran out."""


def find_verdict(
    model: PreTrainedModel, promised: Capability, made: Callable[[Capability], Checked]
) -> ModelVerdict:
    """Find out which drafts a model verifies exactly, up to what its configuration promises.

    Args:
        model: the model, in evaluation mode, as transformers runs it.
        promised: the capability to check first.
        made: function that returns a target of the model with a given capability.

    Raises:
        CannotCheckError: the model gives no logits to compare with.
    """
    reason = ""
    for capability in map(Capability, range(promised, -1, -1)):
        target = made(capability)
        try:
            wrong = _wrong(model, target, _SHAPES[capability])
        except CannotCheckError as error:
            if capability is Capability.PLAIN or is_out_of_memory(error.__cause__ or error):
                raise
            wrong = f"it does not read whole sequences by itself: {error}"
        if not wrong:
            return ModelVerdict(capability, reason)
        reason = wrong
    return ModelVerdict(None, reason)


def num_trials(dtype: torch.dtype) -> int:
    """Return how many choices of tokens must show a difference for it to count."""
    return 1 if dtype in _FULL else _NUM_TRIALS


def agree(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two passes over the same tokens give the same logits, up to rounding.

    Args:
        rows: [n, vocabulary], the logits of one pass.
        expected: [n, vocabulary], the logits of the other pass.
    """
    dtype = expected.dtype
    return not _exceed(_differences(rows, expected), _floor(dtype), dtype)


_Compared = tuple[tuple[str, float], list[float]]
"""An error message, the limit of differences above which it applies, and each row's difference."""


def _wrong(model: PreTrainedModel, target: Checked, shape: "_Shape") -> str:
    """Return what is wrong with a target's passes; empty if nothing is.

    Raises:
        CannotCheckError: the model gives no logits to compare with.
    """
    wrong = ""
    for trial in range(num_trials(model.dtype)):
        try:
            compared = _compared(model, target, shape, np.random.default_rng(trial))
            wrong = _first_wrong(compared, model.dtype)
        except (CannotCheckError, OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  each model raises its own errors
            return f"a pass fails: {reason_of(error)}"
        if not wrong:
            return ""
    return wrong


def _first_wrong(compared: Iterator[_Compared], dtype: torch.dtype) -> str:
    """Return the message for the first wrong rows; rows without one are judged with the next."""
    errors: list[float] = []
    for (wrong, limit), found in compared:
        errors += found
        if wrong and _exceed(errors, limit, dtype):
            return wrong
        errors = [] if wrong else errors
    return ""


def _compared(
    model: PreTrainedModel, target: Checked, shape: "_Shape", rng: np.random.Generator
) -> Iterator[_Compared]:
    """Run the script: the prompt, the draft, the token after the path, and far windows."""
    floor, aside = _floor(model.dtype), list(shape.aside)
    in_prompt, in_draft, behind = shape.wrong
    for length in (_near_context(model), *shape.short):
        script = _Script.drawn(model, shape, length, rng)
        first = target.prefill(script.prompt)
        yield (in_prompt, script.limit), _differences(first, script.first)
        last, *nodes, after = script.tokens.tolist()
        rows = target.verify(last, shape.draft(nodes))
        yield (in_draft, script.limit), _differences(rows, script.own[:-1])
        if aside and model.dtype not in _FULL:  # in full precision rounding cannot hide it
            unmoved = [0, *(shape.path + 1)]
            again = target.verify(last, shape.draft(script.others))
            differences = _differences(again[unmoved], rows[unmoved])
            yield ("tokens of a tree see their siblings", floor * _REPEATED), differences
        target.commit(shape.path)
        rows = target.verify(after, shape.draft(script.others[:1]))
        yield (behind, script.limit), _differences(rows[:1], script.own[-1:])
        for window in _far_windows(model) if aside else ():
            if not target.pretend_marked(window + _PAST_WINDOW, _EDGE):
                break
            rows = target.verify(last, shape.draft(nodes))[aside]
            wrong = f"a tree after a window of {window} tokens sees other tokens"
            yield (wrong, floor), _differences(rows, _singly(target, script)[aside])


def _singly(target: Checked, script: "_Script") -> torch.Tensor:
    """Return [1 + N, vocabulary], the logits of the draft's rows, from passes of one token each."""
    empty, stay = DraftTree.empty(), np.zeros(0, np.int64)
    last, *nodes, _ = script.tokens.tolist()
    rows = {ROOT: target.verify(last, empty)}
    target.commit(stay)
    for *path, _ in script.shape.lines:
        for node in path:
            rows[node] = target.verify(nodes[node], empty)
            target.commit(stay)
        target.drop(len(path))
    return torch.cat([rows[node] for node in range(ROOT, len(nodes))])


def _exceed(errors: list[float], limit: float, dtype: torch.dtype) -> bool:
    """Return whether relative differences of rows exceed rounding.

    In half precision the lower median counts, because a wrong mask, position or cache shows in most
    rows, but a differently chosen expert shows in few rows. In full precision, where chosen experts
    do not differ, the largest difference counts.
    """
    counted = -1 if dtype in _FULL else (len(errors) - 1) // 2
    return not sorted(errors)[counted] <= limit  # also true for NaN


def _floor(dtype: torch.dtype) -> float:
    return _FLOORS.get(dtype, _FLOORS[torch.float32])


def _differences(rows: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Return ||row - expected|| / ||expected - its mean|| for rows [n, V].

    Logits of forbidden tokens (minus infinity, or nearly) are left out.
    """
    sound = _is_sound(expected)
    expected = expected.double().where(sound, 0.0)
    errors = (rows.to(expected.device).double().where(sound, 0.0) - expected).norm(dim=-1)
    scale = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    relative: list[float] = (errors / scale.clamp_min(1e-30)).nan_to_num(nan=torch.inf).tolist()
    return relative


def _is_sound(logits: torch.Tensor) -> torch.Tensor:
    return logits.isfinite() & (logits.abs() < _BARRED)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The draft that checks a capability, and the messages for differing rows.

    Attributes:
        parents: the parent of each of the draft's N nodes.
        lines: the node sequences that the model itself reads after the last token; N stands for the
            token after the path. The last sequence is the committed path and N.
        wrong: messages for a difference after the prompt, in the draft, and after the path; empty
            if the rows are judged together with the next rows.
        aside: rows whose slot differs from their position; they reveal a window that is counted by
            slots.
        short: lengths of additional, shorter prompts.
    """

    parents: tuple[int, ...]
    lines: tuple[tuple[int, ...], ...]
    wrong: tuple[str, str, str]
    aside: tuple[int, ...] = ()
    short: tuple[int, ...] = ()

    @property
    def path(self) -> NDArray[np.int64]:
        """Return int64[k], the committed nodes."""
        return np.array(self.lines[-1][:-1], np.int64)

    def draft(self, nodes: ArrayLike) -> DraftTree:
        """Return the draft, or its first nodes if fewer tokens are given."""
        nodes = np.asarray(nodes, np.int32)
        count = len(nodes)
        claims = np.linspace(0.9, 0.5, count)
        return DraftTree.checked(nodes, self.parents[:count], claims, [Source.MODEL] * count)


_SHAPES: Final = {
    Capability.TREES: _Shape(
        (ROOT, ROOT, 0, 1),  # two children of the root, and a child of each
        ((0, 2, 4), (1, 3, 4)),  # the committed path has rows that must be moved
        (
            "reads a prompt differently",
            "tokens of a tree see others than their own path, or stand elsewhere",
            "its cache does not keep a path of a tree",
        ),
        aside=(2, 3, 4),
    ),
    Capability.CHAINS: _Shape(
        (ROOT, 0, 1, 2),
        ((0, 1, 2, 3), (0, 1, 4)),  # two nodes are rejected, which shows more than one would
        (
            "reads a prompt differently",
            "tokens of a chain see others than those before them",
            "its cache does not give up rejected tokens",
        ),
    ),
    Capability.PLAIN: _Shape(
        (), ((0,),), ("", "", "decoded token by token it differs from generate"), short=(1,)
    ),
}


@dataclass(frozen=True, slots=True)
class _Script:
    """The tokens of one trial, and the model's own logits for these tokens.

    Attributes:
        shape: shape of the trial's draft.
        prompt: int32[n].
        tokens: int32[N + 2], the last token before the draft, the draft's tokens, and the token
            after the path.
        others: int32[N], the draft's tokens, but with other tokens off the path.
        first: [1, vocabulary], the logits after the prompt.
        own: [N + 2, vocabulary], the logits after each of `tokens`.
        limit: largest difference that counts as rounding.
    """

    shape: _Shape
    prompt: TokenIds
    tokens: TokenIds
    others: TokenIds
    first: torch.Tensor
    own: torch.Tensor
    limit: float

    @classmethod
    def drawn(
        cls, model: PreTrainedModel, shape: _Shape, length: int, rng: np.random.Generator
    ) -> "_Script":
        """Choose random tokens, and let the model itself read them.

        Raises:
            CannotCheckError: the model cannot read the tokens.
        """
        size, num_nodes = num_embeddings(model), len(shape.parents)
        allowed = np.setdiff1d(np.arange(size, dtype=np.int32), _special_ids(model.config))
        prompt = rng.choice(allowed, length)
        drawn = np.resize(rng.permutation(allowed), 2 * num_nodes + 2)  # distinct if possible
        tokens, others = drawn[: num_nodes + 2], drawn[num_nodes + 2 :]
        others[shape.path] = tokens[shape.path + 1]
        longest = max(map(len, shape.lines))
        padded = [[*line, *[0] * (longest - len(line))] for line in shape.lines]
        lines = [[*prompt, tokens[0], *tokens[1:][line]] for line in padded]
        try:
            given = torch.from_numpy(np.array(lines, np.int64)).to(model.device)
            first, read = _asked(model, given, length, is_plain=not shape.parents)
        except Exception as error:  # each model raises its own
            raise CannotCheckError(reason_of(error)) from error
        if not _is_sound(read).any(dim=-1).all():
            raise CannotCheckError("its logits are not finite")
        spread = _SPREAD_FACTOR * _differences(first, read[:1, 0])[0]  # one pass is wider
        limit = max(_floor(model.dtype), min(spread, _CEILING))
        rows = {ROOT: read[0, 1]}
        for line, each in zip(shape.lines, read, strict=True):
            rows |= zip(line, each[2:], strict=False)  # after a line there is padding
        own = torch.stack([rows[at] for at in range(ROOT, num_nodes + 1)])
        return cls(shape, prompt, tokens, others, first, own, limit)


def _asked(
    model: PreTrainedModel, tokens: torch.Tensor, length: int, *, is_plain: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a model's own logits after a prompt, and in sequences that start with the prompt.

    The sequences' logits start at the prompt's last token. In half precision, the logits after the
    prompt come from a separate pass over only the prompt.
    """
    in_steps = is_plain or _drops_tokens(model, tokens.shape[1])
    read = (_generated if in_steps else _read)(model, tokens, tokens.shape[1] - length + 1)
    if is_plain or model.dtype in _FULL:  # in full precision rounding is far below the limit
        return read[:1, 0], read
    return _read(model, tokens[:1, :length], 1)[:, 0], read


def _read(model: PreTrainedModel, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Return [rows, count, vocabulary], the last logits of sequences, from one ordinary pass.

    Positions are passed as `generate` does, because some models do not start at 0 by default.
    """
    options: dict[str, Any] = {}
    if "position_ids" in taken_by(model):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        options["position_ids"] = positions.expand_as(tokens)
    logits: torch.Tensor = model(input_ids=tokens, **options).logits
    return logits[:, -count:]


def _drops_tokens(model: PreTrainedModel, length: int) -> bool:
    """Return whether a model's own cache is too short for a sequence of this length.

    Moshi has a window only in its cache: within one pass, a token sees all tokens before it.
    """
    layers = DynamicCache(config=model.config).layers
    sliding = [each for each in layers if isinstance(each, DynamicSlidingWindowLayer)]
    return any(each.sliding_window < length for each in sliding)


def _generated(model: PreTrainedModel, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Return the logits of `_read`, but from a `generate` that must choose these tokens."""

    def chosen(read: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = tokens[:, min(read.shape[1], tokens.shape[1] - 1), None]
        width = max(scores.shape[1], int(token.max()) + 1)  # the token may be beyond the scores
        return scores.new_full((len(scores), width), -torch.inf).scatter(1, token, 0.0)

    config = GenerationConfig(  # type: ignore[no-untyped-call]  # not typed there
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    generate: Any = model.generate
    prompt = tokens[:, : tokens.shape[1] - count + 1]
    output = generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=config,
        logits_processor=[chosen],
    )
    return torch.stack(output.logits, dim=1)


def _special_ids(config: PreTrainedConfig) -> list[int]:
    """Return the ids of special tokens in a configuration, which some models treat differently."""
    stated = [*config.to_dict().items(), *config.get_text_config(decoder=True).to_dict().items()]
    return [
        each
        for name, value in stated
        if name.endswith(("token_id", "token_index"))
        for each in (value if isinstance(value, list) else [value])
        if isinstance(each, int)
    ]


def _windows(config: PreTrainedConfig) -> list[int]:
    """Return all numbers in a configuration whose names say window or chunk."""
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


def _near_context(model: PreTrainedModel) -> int:
    """Return a prompt length that exceeds the short windows."""
    short = [window for window in _windows(model.config) if window <= _LONGEST_WINDOW]
    limit = position_limit(model.config)
    length = max([_NEAR_CONTEXT, *(window + 2 for window in short)])
    return length if limit is None else max(1, min(length, limit - 6))


def _far_windows(model: PreTrainedModel) -> list[int]:
    """Return the windows to exceed with a context of made-up tokens."""
    limit = position_limit(model.config)
    most = _FARTHEST if limit is None else min(_FARTHEST, limit - _PAST_WINDOW - 4)
    return [window for window in _windows(model.config) if window <= most]
