"""What these adapters need of SGLang, compared with what the installed version has.

They stand on a few of its functions, classes and fields, which are looked up by name when it
starts, before it loads a model.
"""

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

from decoder.engines.contract import differences
from decoder.engines.experimental_sglang.corpus import DrafterCorpus

_SPECULATIVE: Final = "sglang.srt.speculative."

_WORKER: Final = "ngram_worker:NGRAMWorker"
_CORPUS: Final = "cpp_ngram.ngram_corpus:NgramCorpus"

_MADE_WITH: Final = {"named": ("server_args", "gpu_id", "nccl_port", "target_worker")}

_RESULT: Final = "sglang.srt.managers.utils:GenerationBatchResult"

_RESULT_FIELDS: Final = ("next_token_ids", "accept_lens", "speculative_num_draft_tokens")

NEEDED: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "NGRAM": {
        f"{_WORKER}.__init__": _MADE_WITH,
        f"{_WORKER}._prepare_draft_tokens": {"named": ("batch",)},
        f"{_CORPUS}.batch_get": {"named": ("req_ids", "batch_tokens", "total_lens")},
        _CORPUS: {"implemented_by": DrafterCorpus},
    },
    "EAGLE": {
        "eagle_worker_v2:EAGLEWorkerV2": {"attributes": ("draft_worker",)},
        "eagle_worker_v2:EAGLEWorkerV2.__init__": _MADE_WITH,
        "eagle_worker_v2:EAGLEWorkerV2.verify": {"named": ("batch",)},
        "eagle_worker_v2:EagleDraftWorker.draft": {"named": ("batch", "with_topology")},
        "eagle_worker_v2:organize_draft_results": {
            "named": ("score_list", "token_list", "parents_list", "num_draft_token"),
        },
        "eagle_worker_common:build_eagle_verify_input": {
            "named": (
                *("batch", "draft_input", "parent_list", "top_scores_index", "draft_tokens"),
                *("draft_probs", "target_worker", "topk", "num_steps", "num_draft_tokens"),
                *("tree_mask_mode", "device"),
            ),
        },
        "eagle_info:EagleVerifyInput": {
            "parameters": (
                *("draft_token", "spec_steps", "topk", "draft_token_num", "kv_loc_plan"),
                "prepared_out_cache_loc",
            ),
        },
        "eagle_info:EagleDraftInput": {"parameters": ("bonus_tokens",)},
        _RESULT: {"parameters": _RESULT_FIELDS},
    },
    "DFLASH": {
        "dflash_worker_v2:DFlashWorkerV2.__init__": _MADE_WITH,
        "dflash_worker_v2:DFlashWorkerV2.forward_batch_generation": {"named": ("batch",)},
        "dflash_worker_v2:GrammarTree.from_linear_chain": {"named": ("verify_ids_2d",)},
        "dflash_worker_v2:DFlashVerifyInput": {"parameters": ("draft_token", "draft_token_num")},
        "dflash_info_v2:DFlashDraftInputV2": {"parameters": ("bonus_tokens",)},
        _RESULT: {"parameters": _RESULT_FIELDS},
    },
}
"""By what SGLang drafts with: functions and classes, and what `differences` is asked about them;
the parameters of a dataclass are its fields."""


def changes(drafts_with: str) -> list[str]:
    """Return a sentence for each thing that the engine has another way than expected.

    Args:
        drafts_with: "NGRAM" for retrieval alone, "EAGLE" or "DFLASH" for retrieval on top of such a
            drafter.
    """
    found = [
        sentence
        for name, needed in NEEDED[drafts_with].items()
        for sentence in differences(_found(name), called=_shown(name), **needed)
    ]
    return found + _new_calls() if drafts_with == "NGRAM" else found


def _new_calls() -> list[str]:
    """Return what the engine's worker calls that our corpus has not."""
    worker = _found(_WORKER)
    source = "" if worker is None else inspect.getsource(worker)
    called = sorted(set(re.findall(r"self\.ngram_corpus\.(\w+)", source)))
    return [
        f"NGRAMWorker calls `{name}` of its corpus, which is new"
        for name in called
        if not hasattr(DrafterCorpus, name)
    ]


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
