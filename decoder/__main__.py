"""`python -m decoder`: see `decoder.commands`."""

import sys


def run() -> None:
    """Run the command line; say what to install where the decoder's libraries are missing."""
    try:
        from decoder.commands import main  # noqa: PLC0415  (the light client lacks what it needs)
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is missing: run `pip install 'foredraft[decoder]'`")
    main()


if __name__ == "__main__":
    run()
