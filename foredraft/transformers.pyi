from decoder.engines.transformers.custom_generate import (
    Foredraft as Foredraft,
    foredraft_generate as foredraft_generate,
)
