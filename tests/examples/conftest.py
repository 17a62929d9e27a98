"""What these tests share with the decoder's: one thread, no costs from other runs."""

from tests.decoder.model_fixtures import _no_costs_from_other_runs, _threads  # noqa: F401  fixtures
