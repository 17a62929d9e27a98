"""The speculative algorithm that is registered with SGLang: SGLang's NGRAM with our drafts."""

from typing import Any, Final

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

_CAPACITY: Final = 1 << 10
"""Nodes of the trie that SGLang's worker creates before our corpus replaces it. The default of ten
million would briefly take gigabytes."""


class ForedraftAlgorithm(CustomSpecAlgo):  # type: ignore[misc]  # sglang is not there to be checked
    """An algorithm with the properties of NGRAM."""

    def is_ngram(self) -> bool:
        """Return true: SGLang must treat it as NGRAM."""
        return True

    def supports_mixed_chunk(self) -> bool:
        """Return false: prefill and decoding are not mixed."""
        return False

    def has_draft_kv(self) -> bool:
        """Return false: drafts have no cache."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Return false: drafts have no hidden states."""
        return False

    def need_topk(self) -> bool:
        """Return false: there is no draft model whose best tokens are needed."""
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Set the arguments that NGRAM sets.

        SGLang passes a stand-in object that records attributes. It would lose the overrides that
        SGLang's own handler declares, so they are set again.
        """
        SpeculativeAlgorithm.NGRAM.handle_server_args(server_args)
        for _source, fields in list(server_args._resolved_overrides or ()):  # noqa: SLF001  (see above)
            for name, value in fields.items():
                setattr(server_args, name, value)
        server_args.speculative_ngram_capacity = _CAPACITY
