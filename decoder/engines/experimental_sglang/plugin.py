"""The entry point `sglang.srt.plugins`: makes `--speculative-algorithm FOREDRAFT` known.

SGLang loads it in each of its processes, wherever this project is installed; until the algorithm
is chosen, or retrieval on top of a trained drafter is asked for, it costs one import.

Retrieval on top is not an algorithm of its own: much of SGLang asks by name whether it drafts with
EAGLE or EAGLE3, so the name stays, and SGLang's own hooks put our worker in place of its.
"""

import os
from collections.abc import Callable
from typing import Any, Final

from decoder.engines.contract import check_contract
from decoder.engines.engine_options import OVER_DRAFTER, check_version
from decoder.engines.experimental_sglang import TESTED

ALGORITHM: Final = "FOREDRAFT"
"""The value of `--speculative-algorithm`."""


def register() -> None:
    """Register the algorithm with SGLang, and put retrieval on top of its drafter if asked to."""
    from sglang.srt.speculative.spec_info import (  # noqa: PLC0415  (SGLang calls us while it loads)
        SpeculativeAlgorithm,
    )

    from decoder.engines.experimental_sglang.algorithm import ForedraftAlgorithm  # noqa: PLC0415  (as above)

    SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        validate_server_args=check_server_args,
        spec_class=ForedraftAlgorithm,
    )(worker_class)
    if is_over():
        _hook()


def is_over() -> bool:
    """Return whether retrieval is to go on top of SGLang's own drafter.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    stated = os.environ.get(OVER_DRAFTER, "")
    if stated not in {"", "0", "1"}:
        raise ValueError(f"{OVER_DRAFTER} is 0 or 1, not {stated!r}")
    return stated == "1"


def check_server_args(server_args: Any) -> None:
    """Refuse arguments that are not supported.

    Raises:
        ValueError: the model is spread over stages of a pipeline.
    """
    if server_args.pp_size != 1:
        raise ValueError(f"--speculative-algorithm {ALGORITHM} takes --pp-size 1")


def worker_class(_server_args: Any) -> type:
    """Return the class of the worker that drafts.

    Raises:
        UnsupportedEngineError: this SGLang is made in another way than expected; says how.
    """
    check_version(TESTED, "sglang")
    _check_engine("NGRAM")
    from decoder.engines.experimental_sglang.worker import ForedraftWorker  # noqa: PLC0415  (loads the engine)

    return ForedraftWorker


def over_class(base: type, server_args: Any) -> type:
    """Return a class of SGLang's workers with retrieval on top.

    Args:
        base: the class that SGLang would use.
        server_args: the engine's.

    Raises:
        ValueError: the drafter or an argument is not supported; says which.
        UnsupportedEngineError: this SGLang is made in another way than expected; says how.
    """
    check_version(TESTED, "sglang")
    refused = [option for option, is_set in _not_with(server_args).items() if is_set]
    if refused:
        raise ValueError(f"{OVER_DRAFTER}=1 goes without {', '.join(refused)}")
    drafts_with = _OVER.get(base.__name__)
    if drafts_with is None:
        raise ValueError(
            f"{OVER_DRAFTER}=1 takes --speculative-algorithm EAGLE, EAGLE3, NEXTN or STANDALONE of "
            f"one layer, or DFLASH, and not what SGLang drafts with here ({base.__name__})"
        )
    _check_engine(drafts_with)
    if drafts_with == "DFLASH":
        from decoder.engines.experimental_sglang import over_blocks  # noqa: PLC0415  (as above)

        return over_blocks.over(base)
    from decoder.engines.experimental_sglang import over_trained  # noqa: PLC0415  (as above)

    return over_trained.over(base)


_OVER: Final = {
    "EAGLEWorkerV2": "EAGLE",
    "StandaloneWorkerV2": "EAGLE",
    "DFlashWorkerV2": "DFLASH",
}
"""SGLang's workers whose drafter and verification are where they are expected to be, and what they
draft with as `conformance.py` names it."""

_CREATES: Final = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"


def _hook() -> None:
    """Have SGLang make its worker by way of ours: its own drafters cannot be registered again."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415  (as above)

    def create(original: Callable[..., type], algorithm: Any, server_args: Any) -> type:
        return over_class(original(algorithm, server_args), server_args)

    HookRegistry.register(_CREATES, create, HookType.AROUND)


def _not_with(server_args: Any) -> dict[str, bool]:
    """Return options that make steps, ranks or verification others than these drafts expect."""
    from sglang.srt.arg_groups.overrides import resolving_view  # noqa: PLC0415  (as above)

    view = resolving_view(server_args)
    return {
        "--pp-size": view.pp_size != 1,
        "attention that is divided over data (--enable-dp-attention)": view.attn_dp_size > 1,
        "--enable-mixed-chunk": view.enable_mixed_chunk,
        "--speculative-use-rejection-sampling": view.speculative_use_rejection_sampling,
    }


def _check_engine(drafts_with: str) -> None:
    from decoder.engines.experimental_sglang.conformance import changes  # noqa: PLC0415  (as above)

    check_contract(("sglang",), TESTED, changes(drafts_with))
