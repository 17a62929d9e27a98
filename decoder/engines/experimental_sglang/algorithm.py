"""The speculative algorithm that SGLang knows us as: its own NGRAM, but for the drafts."""

from typing import Any, Final

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

_CAPACITY: Final = 1 << 10
"""Nodes of the trie that SGLang's worker makes before ours takes its place; at its default of ten
million it would hold gigabytes for that moment."""


class ForedraftAlgorithm(CustomSpecAlgo):  # type: ignore[misc]  # sglang is not there to be checked
    """Answers all that SGLang asks of an algorithm as NGRAM does."""

    def is_ngram(self) -> bool:
        """Tell that what NGRAM needs is needed."""
        return True

    def supports_mixed_chunk(self) -> bool:
        """Tell that prefill and decoding are not mixed."""
        return False

    def has_draft_kv(self) -> bool:
        """Tell that drafts have no cache of their own."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Tell that there are none."""
        return False

    def need_topk(self) -> bool:
        """Tell that no draft model is asked for its best tokens."""
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Set what NGRAM sets.

        SGLang shows a stand-in that notes attributes which are set. What its own handler declares
        would be lost there, so it is set once more.
        """
        SpeculativeAlgorithm.NGRAM.handle_server_args(server_args)
        for _source, fields in list(server_args._resolved_overrides or ()):  # noqa: SLF001  (see above)
            for name, value in fields.items():
                setattr(server_args, name, value)
        server_args.speculative_ngram_capacity = _CAPACITY
