"""What the decoder's tests share; in an engine's own environment they do without."""

from contextlib import suppress

with suppress(ImportError):  # there is no torch there, or transformers of another version
    from tests.decoder.model_fixtures import (  # noqa: F401  fixtures
        _no_costs_from_other_runs,
        _own_norms_are_known,
        _threads,
        byte_tokenizer,
        costs_of_earlier_tests,
        kept_costs,
        language_model,
        model_directory,
        prompt,
        questions,
        real_model,
    )
