"""What these tests share with the decoder's: a tokenizer."""

from tests.decoder.conftest import byte_tokenizer  # noqa: F401  a fixture
