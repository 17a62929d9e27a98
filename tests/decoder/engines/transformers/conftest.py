"""What these tests share with the decoder's: tiny models, one thread, no costs from other runs."""

from tests.decoder.model_fixtures import (  # noqa: F401  fixtures
    _no_costs_from_other_runs,
    _threads,
    byte_tokenizer,
    model_directory,
    real_model,
)
