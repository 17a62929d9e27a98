"""The entry point `sglang.srt.plugins`: it registers `--speculative-algorithm FOREDRAFT`.

SGLang loads the entry point in each of its processes, wherever this project is installed. It costs
one import if the algorithm is not chosen.
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
        ValueError: the model is split into several pipeline stages.
    """
    if server_args.pp_size != 1:
        raise ValueError(f"--speculative-algorithm {ALGORITHM} needs --pp-size 1")


def worker_class(_server_args: Any) -> type:
    """Return the class of the worker that drafts.

    Raises:
        UnsupportedEngineError: SGLang differs from the tested versions; the message says how.
    """
    check_version(TESTED, "sglang")
    from decoder.plugins.experimental_sglang.conformance import changes  # noqa: PLC0415  (loads the engine)

    check_contract(("sglang",), TESTED, changes())
    from decoder.plugins.experimental_sglang.worker import ForedraftWorker  # noqa: PLC0415  (as above)

    return ForedraftWorker
