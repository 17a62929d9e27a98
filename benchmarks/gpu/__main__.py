"""Starts the measurement on a CUDA device; what is missing for it is said in a line."""

import sys
from importlib.metadata import version

from benchmarks.gpu.missing import missing_packages


def main() -> None:
    """Run the command, or say which packages are to be carried along."""
    try:
        from benchmarks.gpu import device_measuring  # noqa: PLC0415  (it needs what may be missing)

        version("foredraft")  # results name it
    except ImportError as error:  # an older package may lack what is imported from it
        missing = missing_packages() or [str(error)]
        sys.exit(f"error: missing on this machine: {', '.join(missing)}: install them first")
    device_measuring.main()


if __name__ == "__main__":
    main()
