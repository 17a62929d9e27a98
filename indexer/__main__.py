"""`python -m indexer`: see `indexer.commands`."""

import sys


def run() -> None:
    """Run the command line; say what to install where the indexer's libraries are missing."""
    try:
        from indexer.commands import main  # noqa: PLC0415  (the light client lacks what it needs)
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is missing: run `pip install 'foredraft[index]'`")
    main()


if __name__ == "__main__":
    run()
