"""Drafts for llama-cpp-python: a draft model for `llama_cpp.Llama`.

    llm = Llama("model.gguf", n_ctx=4096, logits_all=True)
    draft_model = attach(llm, drafter)
    with draft_model.request(tenant="a", predictions=[text]) as request:
        llm.create_completion(prompt)

Before each pass, the engine passes all tokens of its sequence, as a view of its own memory. It
reports neither the start nor the end of a sequence. The pass verifies a draft tree, and the engine
samples at each node until its choice is not in the tree (`tree_passes`). This is also exact with
sampling, grammars and penalties.

The engine keeps the logits of all tokens in a pass, because verification needs them. The most
probable tokens of these logits are drafted again after the same last tokens (`RecycledLogits`), in
one tree with retrieved drafts (`FusedDrafter`).
"""

from decoder.plugins.llama_cpp.attaching import (
    DraftedRequest,
    DrafterDraftModel,
    attach,
    check_engine,
    measure_costs,
)

__all__ = ["DraftedRequest", "DrafterDraftModel", "attach", "check_engine", "measure_costs"]
