"""Drafts for llama-cpp-python: a draft model for `llama_cpp.Llama`.

    llm = Llama("model.gguf", n_ctx=4096, logits_all=True)
    draft_model = attach(llm, drafter)
    with draft_model.request(tenant="a", predictions=[text]) as request:
        llm.create_completion(prompt)

Before each pass the engine shows all tokens of its sequence, as a view of its own memory. It tells
neither when a sequence begins nor when one ends. A tree of drafts is verified in that pass, and the
engine samples at each node until its choice is not in the tree (`tree_passes`): exact under
sampling, grammars and penalties, too.

The engine keeps the logits of all tokens of a pass, as verifying drafts demands. What they found
likely is drafted again where the same last tokens come (`RecycledLogits`), in one tree with what is
retrieved (`FusedDrafter`).
"""

from decoder.plugins.llama_cpp.attaching import (
    DraftedRequest,
    DrafterDraftModel,
    attach,
    check_engine,
    measure_costs,
)

__all__ = ["DraftedRequest", "DrafterDraftModel", "attach", "check_engine", "measure_costs"]
