"""The entry point `sglang.srt.plugins`: makes `--speculative-algorithm FOREDRAFT` known.

SGLang loads it in each of its processes, wherever this project is installed; until the algorithm
is chosen it costs one import.
"""

from typing import Any, Final

from decoder.engines.contract import check_contract
from decoder.engines.engine_options import check_version
from decoder.plugins.experimental_sglang import TESTED

ALGORITHM: Final = "FOREDRAFT"
"""The value of `--speculative-algorithm`."""


def register() -> None:
    """Register the algorithm with SGLang."""
    from sglang.srt.speculative.spec_info import (  # noqa: PLC0415  (SGLang calls us while it loads)
        SpeculativeAlgorithm,
    )

    from decoder.plugins.experimental_sglang.algorithm import ForedraftAlgorithm  # noqa: PLC0415  (as above)

    SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        validate_server_args=check_server_args,
        spec_class=ForedraftAlgorithm,
    )(worker_class)


def check_server_args(server_args: Any) -> None:
    """Refuse arguments that are not supported.

    Raises:
        ValueError: the model is spread over stages of a pipeline.
    """
    if server_args.pp_size != 1:
        raise ValueError(f"--speculative-algorithm {ALGORITHM} takes --pp-size 1")


def worker_class(_server_args: Any) -> type:
    """Return the class of the worker that drafts.

    Raises:
        UnsupportedEngineError: this SGLang is made in another way than expected; says how.
    """
    check_version(TESTED, "sglang")
    from decoder.plugins.experimental_sglang.conformance import changes  # noqa: PLC0415  (loads the engine)

    check_contract(("sglang",), TESTED, changes())
    from decoder.plugins.experimental_sglang.worker import ForedraftWorker  # noqa: PLC0415  (as above)

    return ForedraftWorker
