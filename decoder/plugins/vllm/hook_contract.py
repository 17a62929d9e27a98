"""The arguments of vLLM's hook for custom proposers, and access to vLLM's running requests.

vLLM calls the hook experimental and has no abstract class for it. So the arguments are read from
the call in the source of vLLM's model runner. A version that differs is refused, and the message
says what changed. `foreign_sources` reads a version that is not installed.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.errors import UnsupportedEngineError

METHOD: Final = "custom_class"
"""The method in `speculative_config` that selects a custom proposer."""

PASSED: Final = ("sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu")
"""Positional arguments of `propose`, by the last parts of their names in the runner."""

USUAL_MAX_TOKENS: Final = 128
"""`MAX_SPEC_LEN` of vLLM 0.32; its rejection sampler raises an error above it."""

_BROKEN: Final = "vLLM's hook has changed, so nothing is drafted"


@dataclass(frozen=True, slots=True)
class Sources:
    """Source texts of vLLM; each is empty if it cannot be read.

    Attributes:
        runner: source that contains the method `propose_draft_token_ids`.
        batch: source of the module with `CachedRequestState` and `InputBatch`.
        sampling: source of the module with `SamplingParams`.
    """

    runner: str = ""
    batch: str = ""
    sampling: str = ""


def foreign_sources(folder: Path) -> Sources:
    """Return the sources of a version in a folder, such as `vllm` in an unpacked wheel."""
    return Sources(
        (folder / "v1/worker/gpu_model_runner.py").read_text(),
        (folder / "v1/worker/gpu_input_batch.py").read_text(),
        (folder / "sampling_params.py").read_text(),
    )


def running_sources(runner: object) -> Sources:
    """Return the sources of the running vLLM, given the model runner of this process."""

    def batch() -> str:
        from vllm.v1.worker import gpu_input_batch  # noqa: PLC0415  only inside vLLM

        return inspect.getsource(gpu_input_batch)

    def sampling() -> str:
        from vllm import sampling_params  # noqa: PLC0415

        return inspect.getsource(sampling_params)

    def hook() -> str:
        return inspect.getsource(type(runner).propose_draft_token_ids)  # type: ignore[attr-defined]

    return Sources(*(_text(find) for find in (hook, batch, sampling)))


def _text(find: Callable[[], str]) -> str:
    with suppress(Exception):  # compiled or without a file: nothing to compare
        return textwrap.dedent(find())
    return ""


def hook_changes(sources: Sources) -> str:
    """Return how a version's call of `propose` differs from the tested call; empty if equal."""
    if not sources.runner:
        return ""
    calls = _calls_of_propose(ast.parse(sources.runner))
    if not calls:
        return (
            f"{_BROKEN}: its runner does not call `propose` for the method {METHOD!r} in "
            "GPUModelRunner.propose_draft_token_ids, as the tested versions do"
        )
    for call in calls:
        named = {each.arg for each in call.keywords}
        known = [name for name in PASSED if name not in named]
        passed = [_last_name(each) for each in call.args]
        if passed != known:
            return (
                f"{_BROKEN}: it calls propose({', '.join(_shown(call))}), but this adapter takes "
                f"propose({', '.join(PASSED)}, ...)"
            )
    return ""


def request_changes(sources: Sources) -> str:
    """Return the request fields that a version lacks or has moved; empty if all are in place."""
    wanted = (
        (sources.batch, "CachedRequestState", "sampling_params"),
        (sources.batch, "InputBatch", "req_ids"),
        (sources.sampling, "SamplingParams", "extra_args"),
    )
    missing = [
        f"{name} has no {field}"
        for source, name, field in wanted
        if source and field not in _members(ast.parse(source), name)
    ]
    return "; ".join(missing)


def _calls_of_propose(tree: ast.AST) -> list[ast.Call]:
    """Return the calls of `propose` in branches that test for our method."""
    return [
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and _names_method(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "propose"
    ]


def _names_method(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == METHOD for node in ast.walk(test))


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rsplit(".", 1)[-1]


def _shown(call: ast.Call) -> list[str]:
    return [_last_name(each) for each in call.args] + [f"{each.arg}=" for each in call.keywords]


def _members(tree: ast.AST, name: str) -> set[str]:
    """Return the names that a class defines, and the attributes that its methods set."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef):
                    found.add(part.name)
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    found.add(part.target.id)
                elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    found.add(part.attr)
    return found


def most_tokens() -> int:
    """Return the most tokens of a sequence that vLLM verifies in a pass."""
    with suppress(Exception):
        from vllm.v1.sample import rejection_sampler  # noqa: PLC0415

        return int(rejection_sampler.MAX_SPEC_LEN)
    return USUAL_MAX_TOKENS


@dataclass(frozen=True, slots=True)
class Step:
    """The arguments of vLLM in one step.

    Attributes:
        sampled: the new tokens of each row; a row is empty while its prompt is read.
        lengths: integers[m], the length of each row, new tokens included.
        table: integers[m, max_model_len], the tokens of each row; m is at least the number of rows.
    """

    sampled: Sequence[Sequence[int]]
    lengths: NDArray[np.integer[Any]]
    table: NDArray[np.int32]


class ContractError(UnsupportedEngineError):
    """vLLM's arguments differ from those of its tested versions; the message says how."""


def step_of(given: Sequence[object], named: Mapping[str, object]) -> Step:
    """Return the arguments of a call of `propose`.

    Raises:
        ContractError: the arguments differ from those of the tested versions.
    """
    if len(given) > len(PASSED):
        raise ContractError(
            f"{_BROKEN}: it passes {len(given)} positional arguments, but this adapter takes "
            f"{len(PASSED)} ({', '.join(PASSED)})"
        )
    values = dict(zip(PASSED, given, strict=False)) | dict(named)
    missing = [name for name in PASSED if name not in values]
    if missing:
        raise ContractError(f"{_BROKEN}: it does not pass {', '.join(missing)}")
    sampled, lengths, table = (values[name] for name in PASSED)
    if not isinstance(sampled, list) or not all(isinstance(each, list) for each in sampled):
        raise ContractError(
            f"{_BROKEN}: sampled_token_ids is a {type(sampled).__name__} instead of a list of "
            "lists; asynchronous scheduling can cause this"
        )
    _check_array("num_tokens_no_spec", lengths, 1, len(sampled))
    _check_array("token_ids_cpu", table, 2, len(sampled))
    return Step(sampled, lengths, table)  # type: ignore[arg-type]  # checked


def _check_array(name: str, value: Any, num_axes: int, num_rows: int) -> None:
    is_array = isinstance(value, np.ndarray) and value.dtype.kind == "i"
    if not is_array or value.ndim != num_axes or len(value) < num_rows:
        raise ContractError(
            f"{_BROKEN}: {name} is {type(value).__name__}{tuple(getattr(value, 'shape', ()))} "
            f"instead of an array of integers with {num_axes} axes and {num_rows} rows or more"
        )


_RECURRENT: Final = ("is_hybrid", "has_inner_state", "is_attention_free")
"""Attributes of vLLM's `ModelConfig`; one is set if a model has state besides keys and values."""

_GATED_DELTA: Final = "GDN_ATTN"
"""vLLM's type of gated delta nets, the linear attention of Qwen3-Next and Qwen3.5."""


def recurrent_state(vllm_config: Any, *, fills: bool) -> str:
    """Return why a model cannot be drafted for; empty if it can.

    A recurrent state (Mamba, linear attention, short convolutions) cannot drop a rejected token.
    With any speculation, vLLM keeps one state for each token of a step, and continues from the
    state of the last accepted token. But it does so only in steps with drafts. After a step without
    drafts, it continues from a wrong state, and outputs are wrong. This happens even if nothing is
    ever proposed. vLLM's trained drafters propose the same number of tokens in every step. Then
    gated delta nets are right, but Mamba and short convolutions are wrong on CPUs.

    Args:
        vllm_config: vLLM's configuration, after the model is loaded.
        fills: whether all proposals have `num_speculative_tokens` tokens.
    """
    try:
        model, cache = vllm_config.model_config, vllm_config.cache_config
        if not any(bool(getattr(model, kind)) for kind in _RECURRENT):
            return ""
        mode = str(cache.mamba_cache_mode)
        layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
        states = [each.mamba_type for each in layers.values() if hasattr(each, "mamba_type")]
        kinds = {str(getattr(each, "name", each)) for each in states}
    except AttributeError as error:
        return f"cannot determine whether the model has a recurrent state: {error}"
    wrong = (
        "the model has a recurrent state, and vLLM decodes it wrongly with a proposer that may "
        "propose nothing: leave out speculative_config"
    )
    if kinds != {_GATED_DELTA}:
        return f"{wrong} (layers of {', '.join(sorted(kinds)) or 'an unknown kind'})"
    if not fills:
        return f"{wrong}, or set always_propose, which pads every proposal"
    if mode != "none":
        return (
            f"{wrong}, or switch prefix caching off: always_propose was only tested with "
            f"mamba_cache_mode 'none', but this is {mode!r}"
        )
    return ""


class RunnerView:
    """The requests of the model runner that holds a proposer.

    Row i of a step belongs to the request `input_batch.req_ids[i]`; vLLM's own suffix proposer
    relies on this too.

    Args:
        runner: the model runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @property
    def running(self) -> Container[str]:
        """Names of the requests that have not ended, including preempted ones."""
        requests: Mapping[str, object] = self._runner.requests
        return requests

    @property
    def num_rows(self) -> int:
        """Number of rows in the step."""
        return len(self._runner.input_batch.req_ids)

    def name_of(self, row: int) -> str:
        """Return the name of a row's request."""
        return str(self._runner.input_batch.req_ids[row])

    def state_of(self, name: str) -> Any:
        """Return the runner's own object for a request: `CachedRequestState`."""
        return self._runner.requests[name]

    @staticmethod
    def carried_by(state: Any) -> Mapping[str, Any] | None:
        """Return the `extra_args` of a request's sampling parameters."""
        sampling = state.sampling_params
        carried: Mapping[str, Any] | None = None if sampling is None else sampling.extra_args
        return carried


def runner_of(proposer: object) -> object | None:
    """Return the model runner that is calling a proposer; `None` if the caller is no model runner.

    vLLM passes neither the runner nor its requests to the proposer. So the runner is searched in
    the call stack, as the object whose `drafter` is the proposer.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not proposer and getattr(owner, "drafter", None) is proposer:
            return owner
        frame = frame.f_back
    return None
