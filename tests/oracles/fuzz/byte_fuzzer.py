"""`python -m tests.oracles.fuzz.byte_fuzzer NAME FOLDER [options of libFuzzer, or a file]`.

What gives one reader inputs, guided by what of `retriever` they reach: see `fuzz_bytes`, which
starts it. It ends as libFuzzer does: with 0, or with 77 and the input in a file.
"""

import logging
import sys
from pathlib import Path

import atheris

_KERNELS = Path(__file__).parents[3] / "retriever" / "kernels"
_COMPILED = [f"retriever.kernels.{each.stem}" for each in _KERNELS.glob("*.py")]
_GENERATED = ["retriever.v1.retriever_pb2", "retriever.v1.retriever_pb2_grpc"]

with atheris.instrument_imports(include=["retriever"], exclude=[*_COMPILED, *_GENERATED]):
    from tests.oracles.fuzz.byte_calls import CalledService
    from tests.oracles.fuzz.byte_readers import readers
    from tests.oracles.fuzz.byte_seeds import seeds


def main() -> None:
    """Give inputs until there were enough."""
    logging.getLogger("retriever").setLevel(logging.CRITICAL)  # each refusal would be a line
    name, folder = sys.argv[1], Path(sys.argv[2])
    read = readers(lambda: CalledService(folder), folder)[name]
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds()[name]):
        (corpus / f"seed-{number}").write_bytes(seed)
        read(seed)
    options = sys.argv[3:]
    is_again = any(Path(option).is_file() for option in options)
    atheris.Setup([sys.argv[0], *options, *([] if is_again else [str(corpus)])], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
