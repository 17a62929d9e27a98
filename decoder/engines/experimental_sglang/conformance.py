"""Whether the installed SGLang is made as these adapters expect, derived from its own classes.

Each adapter stands on a few functions, classes and fields of the engine. They are looked up in the
engine that is there, so that another version is refused with what has changed, before it loads a
model.
"""

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

from decoder.engines.experimental_sglang.corpus import DrafterCorpus

_SPECULATIVE: Final = "sglang.srt.speculative."

CALLED: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "NGRAM": {
        "ngram_worker:NGRAMWorker.__init__": (
            "server_args",
            "gpu_id",
            "nccl_port",
            "target_worker",
        ),
        "ngram_worker:NGRAMWorker._prepare_draft_tokens": ("batch",),
        "cpp_ngram.ngram_corpus:NgramCorpus.batch_get": ("req_ids", "batch_tokens", "total_lens"),
    },
    "EAGLE": {
        "eagle_worker_v2:EAGLEWorkerV2.__init__": (
            *("server_args", "gpu_id", "nccl_port", "target_worker"),
        ),
        "eagle_worker_v2:EAGLEWorkerV2.verify": ("batch",),
        "eagle_worker_v2:EAGLEWorkerV2.draft_worker": (),
        "eagle_worker_v2:EagleDraftWorker.draft": ("batch", "with_topology"),
        "eagle_worker_v2:organize_draft_results": (
            *("score_list", "token_list", "parents_list", "num_draft_token"),
        ),
        "eagle_worker_common:build_eagle_verify_input": (
            *("batch", "draft_input", "parent_list", "top_scores_index", "draft_tokens"),
            *("draft_probs", "target_worker", "topk", "num_steps", "num_draft_tokens"),
            *("tree_mask_mode", "device"),
        ),
    },
}
"""By what SGLang drafts with: functions, and the parameters that they must take."""

READ: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "NGRAM": {},
    "EAGLE": {
        "eagle_info:EagleVerifyInput": (
            *("draft_token", "spec_steps", "topk", "draft_token_num", "kv_loc_plan"),
            "prepared_out_cache_loc",
        ),
        "eagle_info:EagleDraftInput": ("bonus_tokens",),
        "sglang.srt.managers.utils:GenerationBatchResult": (
            *("next_token_ids", "accept_lens", "speculative_num_draft_tokens"),
        ),
    },
}
"""By what SGLang drafts with: dataclasses, and the fields that they must have."""


def changes(drafts_with: str) -> list[str]:
    """Return a sentence for each thing that the engine has another way than expected.

    Args:
        drafts_with: "NGRAM" for retrieval alone, "EAGLE" for retrieval on top of a drafter.
    """
    found = [*_missing_parameters(CALLED[drafts_with]), *_missing_fields(READ[drafts_with])]
    if drafts_with == "NGRAM":
        found += _other_methods()
    return found


def check_engine(drafts_with: str, version: str, tested: str) -> None:
    """Refuse an engine that is made in another way.

    Args:
        drafts_with: see `changes`.
        version: of the engine.
        tested: versions that the adapter was tested with.

    Raises:
        ValueError: with what has changed.
    """
    found = changes(drafts_with)
    if found:
        raise ValueError(
            f"foredraft was made for SGLang {tested}, and SGLang {version} differs: "
            f"{'; '.join(found)}. Start it without foredraft, or install a version of the two "
            "that fit"
        )


def _missing_parameters(called: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for name, wanted in called.items():
        found = _found(name)
        if found is None:
            yield f"there is no {_shown(name)}"
        elif callable(found):
            yield from _lacking(_shown(name), wanted, inspect.signature(found).parameters)


def _lacking(
    shown: str, wanted: Sequence[str], parameters: Mapping[str, inspect.Parameter]
) -> Iterator[str]:
    missing = [name for name in wanted if name not in parameters]
    if missing:
        yield f"{shown} takes no {', '.join(missing)}"
    required = [
        name
        for name, each in parameters.items()
        if each.default is each.empty
        and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
        and name not in {*wanted, "self"}
    ]
    if required:
        yield f"{shown} also needs {', '.join(required)}"


def _missing_fields(read: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for name, wanted in read.items():
        found = _found(name)
        if found is None or not is_dataclass(found):
            yield f"there is no {_shown(name)} with fields"
            continue
        known = {each.name for each in fields(found)}
        missing = [each for each in wanted if each not in known]
        if missing:
            yield f"{_shown(name)} has no {', '.join(missing)}"


def _other_methods() -> Iterator[str]:
    """Say what the engine's worker calls that our corpus has not, or takes with other arguments."""
    worker = _found("ngram_worker:NGRAMWorker")
    corpus = _found("cpp_ngram.ngram_corpus:NgramCorpus")
    if worker is None or corpus is None:
        return
    source = inspect.getsource(worker)
    for name in sorted(set(re.findall(r"self\.ngram_corpus\.(\w+)", source))):
        ours, theirs = getattr(DrafterCorpus, name, None), getattr(corpus, name, None)
        if ours is None:
            yield f"NGRAMWorker calls {name} of its corpus, which is new"
        elif callable(ours) and callable(theirs):
            known, wanted = (len(inspect.signature(each).parameters) - 1 for each in (ours, theirs))
            if known != wanted:
                yield f"NgramCorpus.{name} takes {wanted} arguments instead of {known}"


def _found(name: str) -> Any:
    """Return what a name stands for; None if there is no such thing."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(
            module if module.startswith("sglang.") else _SPECULATIVE + module
        )
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _shown(name: str) -> str:
    return name.partition(":")[2]
