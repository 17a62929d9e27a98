"""Comparison of what the adapter needs from SGLang with the installed version.

The adapter needs a few functions and classes of SGLang. They are looked up by name at the start,
before SGLang loads a model.
"""

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

from decoder.engines.contract import differences
from decoder.plugins.experimental_sglang.corpus import DrafterCorpus

_SPECULATIVE: Final = "sglang.srt.speculative."

_WORKER: Final = "ngram_worker:NGRAMWorker"
_CORPUS: Final = "cpp_ngram.ngram_corpus:NgramCorpus"

NEEDED: Final[Mapping[str, Mapping[str, Any]]] = {
    f"{_WORKER}.__init__": {"named": ("server_args", "gpu_id", "nccl_port", "target_worker")},
    f"{_WORKER}._prepare_draft_tokens": {"named": ("batch",)},
    f"{_CORPUS}.batch_get": {"named": ("req_ids", "batch_tokens", "total_lens")},
    _CORPUS: {"implemented_by": DrafterCorpus},
}
"""Functions and classes of SGLang, and the arguments of `differences` for each."""


def changes() -> list[str]:
    """Return one sentence for each difference between the engine and the tested versions."""
    found = [
        sentence
        for name, needed in NEEDED.items()
        for sentence in differences(_found(name), called=_shown(name), **needed)
    ]
    return found + _new_calls()


def _new_calls() -> list[str]:
    """Return a sentence for each method that the engine's worker calls and our corpus lacks."""
    worker = _found(_WORKER)
    source = "" if worker is None else inspect.getsource(worker)
    called = sorted(set(re.findall(r"self\.ngram_corpus\.(\w+)", source)))
    return [
        f"NGRAMWorker calls `{name}` of its corpus, which is new"
        for name in called
        if not hasattr(DrafterCorpus, name)
    ]


def _found(name: str) -> Any:
    """Return the function or class with a name; None if there is none."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(_SPECULATIVE + module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _shown(name: str) -> str:
    return name.partition(":")[2]
