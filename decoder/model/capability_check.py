"""Checking on a few tokens what a model's configuration promises: trees, chains, plain passes.

All three run one script. A target reads a prompt, verifies a small draft, commits a path of it, and
goes on behind that. A chain is a tree with one child each, and plain passes have drafts without
nodes. The logits of every row must be those that the model gives by itself: for drafts in one
ordinary pass over their paths, each as a sequence of its own; for plain passes those of `generate`.
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
_REPEATED: Final = 1 / 4
"""Of a floor, so much is taken for rounding in passes of one shape, which round alike."""

_NEAR_CONTEXT: Final = 4
_LONGEST_WINDOW: Final = 64
"""Windows up to this are crossed by reading as well as by pretending: reading takes long."""

_FARTHEST: Final = 2048
"""Most tokens that are pretended: windows beyond it are taken from the configuration."""

_PAST_WINDOW: Final = 2
_EDGE: Final = np.arange(_PAST_WINDOW + 1, _PAST_WINDOW + 4)
"""Behind a context so much longer than a window, the first tokens that depths 0, 1 and 2 see."""


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """What a model was found to verify.

    Attributes:
        capability: which drafts; `None` where not even plain passes are those of the model.
        reason: what was wrong with the next better passes, for users; empty where nothing was.
    """

    capability: Capability | None
    reason: str = ""


class Verdicts(Protocol):
    """Keeps verdicts from one start to the next."""

    def verdict_on(self, model: PreTrainedModel) -> ModelVerdict | None:
        """Return the verdict kept for models like this one, `None` where there is none."""
        ...

    def keep_verdict(self, model: PreTrainedModel, verdict: ModelVerdict) -> None:
        """Keep a verdict; where that fails it is found again at the next start."""
        ...


_MOST_KEPT: Final = 8
"""Verdicts that are kept of a model: it is trained and run in turn, or adapters come and go."""


class FoundHere:
    """Keeps verdicts for as long as their models are there, by what they were made of."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[PreTrainedModel, list[tuple[Structure, ModelVerdict]]]
        self._found = WeakKeyDictionary()

    def verdict_on(self, model: PreTrainedModel) -> ModelVerdict | None:
        """See `Verdicts`."""
        now = Structure.of(model)
        latest_first = reversed(self._found.get(model, []))
        return next((verdict for before, verdict in latest_first if now.is_of(before)), None)

    def keep_verdict(self, model: PreTrainedModel, verdict: ModelVerdict) -> None:
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


def find_verdict(
    model: PreTrainedModel, promised: Capability, made: Callable[[Capability], Checked]
) -> ModelVerdict:
    """Find out what a model verifies exactly, at most what its configuration promises.

    Args:
        model: in evaluation mode, as transformers runs it.
        promised: what to begin with.
        made: makes a target of the model that verifies so much.

    Raises:
        CannotCheckError: there is nothing to compare with.
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
    """Return with how many choices of tokens a difference must show before it counts."""
    return 1 if dtype in _FULL else _NUM_TRIALS


def agree(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two passes over the same tokens give the same logits, up to rounding.

    Args:
        rows: [n, vocabulary].
        expected: [n, vocabulary].
    """
    dtype = expected.dtype
    return not _exceed(_differences(rows, expected), _floor(dtype), dtype)


_Compared = tuple[tuple[str, float], list[float]]
"""What is wrong where rows differ by more than a limit, the limit, and by how much each differs."""


def _wrong(model: PreTrainedModel, target: Checked, shape: "_Shape") -> str:
    """Return what is wrong with the passes of a target, empty where nothing is.

    Raises:
        CannotCheckError: see `find_verdict`.
    """
    wrong = ""
    for trial in range(num_trials(model.dtype)):
        try:
            compared = _compared(model, target, shape, np.random.default_rng(trial))
            wrong = _first_wrong(compared, model.dtype)
        except (CannotCheckError, OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  each model raises its own
            return f"a pass fails: {reason_of(error)}"
        if not wrong:
            return ""
    return wrong


def _first_wrong(compared: Iterator[_Compared], dtype: torch.dtype) -> str:
    """Return what the first rows that differ say; what says nothing is judged with the next."""
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
    """Run the script: the prompt, the draft, what follows its path, and windows far behind."""
    floor, aside = _floor(model.dtype), list(shape.aside)
    in_prompt, in_draft, behind = shape.wrong
    for length in (_near_context(model), *shape.short):
        script = _Script.drawn(model, shape, length, rng)
        first = target.prefill(script.prompt)
        yield (in_prompt, script.limit), _differences(first, script.first)
        last, *nodes, after = script.tokens.tolist()
        rows = target.verify(last, shape.draft(nodes))
        yield (in_draft, script.limit), _differences(rows, script.own[:-1])
        if aside and model.dtype not in _FULL:  # there, rounding is too small to hide it
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
            wrong = f"a tree behind its window of {window} sees others"
            yield (wrong, floor), _differences(rows, _singly(target, script)[aside])


def _singly(target: Checked, script: "_Script") -> torch.Tensor:
    """Return the rows of the draft, [1 + N, vocabulary], from passes of one token each."""
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
    """Return whether relative differences of rows are more than rounding.

    In half precision the lower median counts: a wrong mask, position or cache shows in most rows,
    an expert that is chosen differently in few. In full precision, where that does not happen, the
    largest counts.
    """
    counted = -1 if dtype in _FULL else (len(errors) - 1) // 2
    return not sorted(errors)[counted] <= limit  # neither are values that are no numbers


def _floor(dtype: torch.dtype) -> float:
    return _FLOORS.get(dtype, _FLOORS[torch.float32])


def _differences(rows: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Return ||row - expected|| / ||expected - its mean|| of rows [n, V].

    Logits that a model bars (minus infinity, or near it) are left out.
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
    """The draft by which a capability is checked, and what is wrong where its rows differ.

    Attributes:
        parents: of its N nodes.
        lines: what the model reads by itself behind the last token: nodes, of which N is the token
            behind the path. The last line is the path that is committed, and N.
        wrong: what a difference after the prompt says, one in the draft, and one behind the path;
            empty where rows are judged together with the next.
        aside: rows that do not lie where they stand: a window that is counted by slots shows there.
        short: lengths of prompts that are read besides the usual one.
    """

    parents: tuple[int, ...]
    lines: tuple[tuple[int, ...], ...]
    wrong: tuple[str, str, str]
    aside: tuple[int, ...] = ()
    short: tuple[int, ...] = ()

    @property
    def path(self) -> NDArray[np.int64]:
        """int64[k], the nodes that are committed."""
        return np.array(self.lines[-1][:-1], np.int64)

    def draft(self, nodes: ArrayLike) -> DraftTree:
        """Return the draft, or with fewer nodes the beginning of it."""
        nodes = np.asarray(nodes, np.int32)
        count = len(nodes)
        claims = np.linspace(0.9, 0.5, count)
        return DraftTree.checked(nodes, self.parents[:count], claims, [Source.MODEL] * count)


_SHAPES: Final = {
    Capability.TREES: _Shape(
        (ROOT, ROOT, 0, 1),  # two children of the root, and a child of each
        ((0, 2, 4), (1, 3, 4)),  # a path whose rows do not lie where they are kept
        (
            "reads a prompt differently",
            "tokens of a tree see others than their own path, or stand elsewhere",
            "its cache does not keep a path of a tree",
        ),
        aside=(2, 3, 4),
    ),
    Capability.CHAINS: _Shape(
        (ROOT, 0, 1, 2),
        ((0, 1, 2, 3), (0, 1, 4)),  # two are rejected, which shows more than one
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
    """The tokens of one trial, and what the model gives for them by itself.

    Attributes:
        shape: of its draft.
        prompt: int32[n].
        tokens: int32[N + 2], the last one before the draft, its nodes, and the one behind the path.
        others: int32[N], the nodes with other tokens where they are not on the path.
        first: [1, vocabulary], the logits after the prompt.
        own: [N + 2, vocabulary], those after `tokens`.
        limit: what is taken for rounding.
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
        """Draw a prompt of a length and what follows, and have the model read it by itself.

        Raises:
            CannotCheckError: it cannot.
        """
        size, num_nodes = num_embeddings(model), len(shape.parents)
        allowed = np.setdiff1d(np.arange(size, dtype=np.int32), _special_ids(model.config))
        prompt = rng.choice(allowed, length)
        drawn = np.resize(rng.permutation(allowed), 2 * num_nodes + 2)  # siblings differ if two do
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
            raise CannotCheckError("its logits are not numbers")
        spread = _SPREAD_FACTOR * _differences(first, read[:1, 0])[0]  # one pass is wider
        limit = max(_floor(model.dtype), min(spread, _CEILING))
        rows = {ROOT: read[0, 1]}
        for line, each in zip(shape.lines, read, strict=True):
            rows |= zip(line, each[2:], strict=False)  # behind a line it is padding
        own = torch.stack([rows[at] for at in range(ROOT, num_nodes + 1)])
        return cls(shape, prompt, tokens, others, first, own, limit)


def _asked(
    model: PreTrainedModel, tokens: torch.Tensor, length: int, *, is_plain: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a model's own logits after a prompt, in half precision of a pass over it alone.

    And those of sequences that begin with it, from its last token on.
    """
    in_steps = is_plain or _drops_tokens(model, tokens.shape[1])
    read = (_generated if in_steps else _read)(model, tokens, tokens.shape[1] - length + 1)
    if is_plain or model.dtype in _FULL:  # there, rounding is far below what is taken for it
        return read[:1, 0], read
    return _read(model, tokens[:1, :length], 1)[:, 0], read


def _read(model: PreTrainedModel, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Return the last logits of sequences, [rows, count, vocabulary], from one ordinary pass.

    Positions are told as `generate` tells them: some models begin elsewhere by themselves.
    """
    options: dict[str, Any] = {}
    if "position_ids" in taken_by(model):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        options["position_ids"] = positions.expand_as(tokens)
    logits: torch.Tensor = model(input_ids=tokens, **options).logits
    return logits[:, -count:]


def _drops_tokens(model: PreTrainedModel, length: int) -> bool:
    """Return whether a model's own cache does not hold a sequence of this length.

    Moshi has a window in its cache alone: in one pass, a token sees all before it.
    """
    layers = DynamicCache(config=model.config).layers
    sliding = [each for each in layers if isinstance(each, DynamicSlidingWindowLayer)]
    return any(each.sliding_window < length for each in sliding)


def _generated(model: PreTrainedModel, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Return the same as `_read` from `generate`, which is made to choose these tokens."""

    def chosen(read: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = tokens[:, min(read.shape[1], tokens.shape[1] - 1), None]
        width = max(scores.shape[1], int(token.max()) + 1)  # it may be beyond what is ever chosen
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


def _near_context(model: PreTrainedModel) -> int:
    """Return the length of a prompt that crosses the short windows."""
    short = [window for window in _windows(model.config) if window <= _LONGEST_WINDOW]
    limit = position_limit(model.config)
    length = max([_NEAR_CONTEXT, *(window + 2 for window in short)])
    return length if limit is None else max(1, min(length, limit - 6))


def _far_windows(model: PreTrainedModel) -> list[int]:
    """Return the windows that a context of made-up tokens crosses."""
    limit = position_limit(model.config)
    most = _FARTHEST if limit is None else min(_FARTHEST, limit - _PAST_WINDOW - 4)
    return [window for window in _windows(model.config) if window <= most]
