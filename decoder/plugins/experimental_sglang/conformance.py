"""What the adapter needs of SGLang, compared with what the installed version has.

It stands on a few of its functions and classes, which are looked up by name when it starts, before
it loads a model.
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
"""Functions and classes, and what `differences` is asked about them."""


def changes() -> list[str]:
    """Return a sentence for each thing that the engine has another way than expected."""
    found = [
        sentence
        for name, needed in NEEDED.items()
        for sentence in differences(_found(name), called=_shown(name), **needed)
    ]
    return found + _new_calls()


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
        found: Any = importlib.import_module(_SPECULATIVE + module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _shown(name: str) -> str:
    return name.partition(":")[2]
