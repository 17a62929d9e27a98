from decoder.plugins.llama_cpp import (
    DrafterDraftModel as DrafterDraftModel,
    attach as attach,
    measure_costs as measure_costs,
)
