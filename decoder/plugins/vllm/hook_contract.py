"""What vLLM hands a proposer of one's own, read in vLLM's own source, and its running requests.

vLLM calls the hook experimental and has no abstract class for it. So what a version passes is read
where it passes it, in the source of its model runner, and a version that differs is refused with
what changed. `foreign_sources` reads a version that is not installed.
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
"""The method of `speculative_config` under which a proposer of one's own is called."""

PASSED: Final = ("sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu")
"""What `propose` takes by position, by the last part of the name that the runner has for it."""

USUAL_MAX_TOKENS: Final = 128
"""`MAX_SPEC_LEN` of vLLM 0.32; its rejection sampler raises at more tokens of a sequence."""

_BROKEN: Final = "vLLM's hook has changed, so nothing is drafted"


@dataclass(frozen=True, slots=True)
class Sources:
    """Source texts of vLLM; empty where they cannot be read.

    Attributes:
        runner: with the method `propose_draft_token_ids`.
        batch: with `CachedRequestState` and `InputBatch`.
        sampling: with `SamplingParams`.
    """

    runner: str = ""
    batch: str = ""
    sampling: str = ""


def foreign_sources(folder: Path) -> Sources:
    """Return the sources of a version in a folder, such as an unpacked wheel's `vllm`."""
    return Sources(
        (folder / "v1/worker/gpu_model_runner.py").read_text(),
        (folder / "v1/worker/gpu_input_batch.py").read_text(),
        (folder / "sampling_params.py").read_text(),
    )


def running_sources(runner: object) -> Sources:
    """Return the sources of the vLLM that runs, around the runner of this process."""

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
    with suppress(Exception):  # compiled, or without a file: there is nothing to compare
        return textwrap.dedent(find())
    return ""


def hook_changes(sources: Sources) -> str:
    """Return how a version's call of `propose` differs from what is known; empty if it does not."""
    if not sources.runner:
        return ""
    calls = _calls_of_propose(ast.parse(sources.runner))
    if not calls:
        return (
            f"{_BROKEN}: its runner has no call of `propose` for the method {METHOD!r} where it "
            "was in the tested versions (GPUModelRunner.propose_draft_token_ids)"
        )
    for call in calls:
        named = {each.arg for each in call.keywords}
        known = [name for name in PASSED if name not in named]
        passed = [_last_name(each) for each in call.args]
        if passed != known:
            return (
                f"{_BROKEN}: it calls propose({', '.join(_shown(call))}), and this adapter takes "
                f"propose({', '.join(PASSED)}, ...)"
            )
    return ""


def request_changes(sources: Sources) -> str:
    """Return what of requests a version no longer keeps where it was; empty if all is there."""
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
    """Return the calls of a `propose` under a comparison with our method."""
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
    """Return the names that a class defines, and those that it sets on itself."""
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
    """Return how many tokens of a sequence vLLM verifies in a pass."""
    with suppress(Exception):
        from vllm.v1.sample import rejection_sampler  # noqa: PLC0415

        return int(rejection_sampler.MAX_SPEC_LEN)
    return USUAL_MAX_TOKENS


@dataclass(frozen=True, slots=True)
class Step:
    """What vLLM shows of a step.

    Attributes:
        sampled: the new tokens of each row; empty while its prompt is read.
        lengths: integers[m], the length of each row, those tokens included.
        table: integers[m, max_model_len], its tokens; m is at least the number of rows.
    """

    sampled: Sequence[Sequence[int]]
    lengths: NDArray[np.integer[Any]]
    table: NDArray[np.int32]


class ContractError(UnsupportedEngineError):
    """vLLM passes something else than its tested versions; the message says what."""


def step_of(given: Sequence[object], named: Mapping[str, object]) -> Step:
    """Return what `propose` was called with.

    Raises:
        ContractError: it is not what the tested versions pass.
    """
    if len(given) > len(PASSED):
        raise ContractError(
            f"{_BROKEN}: it passes {len(given)} values by position, and this adapter takes "
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
            "lists, as with asynchronous scheduling"
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
"""Of vLLM's `ModelConfig`: whether a model keeps a state beside or instead of keys and values."""

_GATED_DELTA: Final = "GDN_ATTN"
"""vLLM's type of gated delta nets, the linear attention of Qwen3-Next and Qwen3.5."""


def recurrent_state(vllm_config: Any, *, fills: bool) -> str:
    """Return why a model cannot be drafted for, empty if it can.

    A recurrent state (Mamba, linear attention, short convolutions) cannot drop a rejected token.
    With any speculation vLLM keeps a state for each token of a step, and goes on from that of the
    last accepted one, but only in a step that has drafts: after one without, or even where nothing
    is ever proposed, it goes on from a wrong state, and outputs are wrong. With as many proposed
    tokens in every step, as its trained drafters propose, gated delta nets are right; Mamba and
    short convolutions are not on CPUs.

    Args:
        vllm_config: after the model is loaded.
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
        return f"it cannot be told whether the model keeps a recurrent state: {error}"
    wrong = (
        "the model keeps a recurrent state, and vLLM decodes it wrongly with a proposer that may "
        "propose nothing: leave out speculative_config"
    )
    if kinds != {_GATED_DELTA}:
        return f"{wrong} (layers of {', '.join(sorted(kinds)) or 'an unknown kind'})"
    if not fills:
        return f"{wrong}, or set always_propose, which fills every proposal up"
    if mode != "none":
        return (
            f"{wrong}, or switch its prefix caching off: always_propose was tested with "
            f"mamba_cache_mode 'none' alone, and this is {mode!r}"
        )
    return ""


class RunnerView:
    """The requests of the model runner that holds a proposer.

    `Row i` of a step is that of `input_batch.req_ids[i]`; vLLM's own suffix proposer reads it so.

    Args:
        runner: a model runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @property
    def running(self) -> Container[str]:
        """Names of the requests that have not ended, the preempted ones included."""
        requests: Mapping[str, object] = self._runner.requests
        return requests

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self._runner.input_batch.req_ids)

    def name_of(self, row: int) -> str:
        """Return the name of a row's request."""
        return str(self._runner.input_batch.req_ids[row])

    def state_of(self, name: str) -> Any:
        """Return the runner's own object of a request: `CachedRequestState`."""
        return self._runner.requests[name]

    @staticmethod
    def carried_by(state: Any) -> Mapping[str, Any] | None:
        """Return the `extra_args` of a request's sampling parameters."""
        sampling = state.sampling_params
        carried: Mapping[str, Any] | None = None if sampling is None else sampling.extra_args
        return carried


def runner_of(proposer: object) -> object | None:
    """Return the model runner that is calling a proposer, `None` if it is called by another.

    vLLM gives the proposer neither itself nor its requests. The runner is the one around this call
    whose `drafter` the proposer is.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not proposer and getattr(owner, "drafter", None) is proposer:
            return owner
        frame = frame.f_back
    return None
