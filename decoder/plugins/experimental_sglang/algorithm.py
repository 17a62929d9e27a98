"""The speculative algorithm that SGLang registers: its own NGRAM with other drafts."""

from typing import Any, Final

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

_CAPACITY: Final = 1 << 10
"""Nodes of the trie that SGLang's worker makes before ours replaces it; its default of ten million
would take gigabytes for that moment."""


class ForedraftAlgorithm(CustomSpecAlgo):  # type: ignore[misc]  # sglang is not there to be checked
    """Gives SGLang the properties of NGRAM."""

    def is_ngram(self) -> bool:
        """Return true: it needs all that NGRAM needs."""
        return True

    def supports_mixed_chunk(self) -> bool:
        """Return false: prefill and decoding are not mixed."""
        return False

    def has_draft_kv(self) -> bool:
        """Return false: drafts have no cache."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Return false: there are none."""
        return False

    def need_topk(self) -> bool:
        """Return false: there is no draft model to ask for its best tokens."""
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Set the arguments that NGRAM sets.

        SGLang passes a stand-in that records attributes. It would lose the overrides that SGLang's
        own handler declares, so they are set once more.
        """
        SpeculativeAlgorithm.NGRAM.handle_server_args(server_args)
        for _source, fields in list(server_args._resolved_overrides or ()):  # noqa: SLF001  (see above)
            for name, value in fields.items():
                setattr(server_args, name, value)
        server_args.speculative_ngram_capacity = _CAPACITY
