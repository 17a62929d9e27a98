"""`python -m retriever`: see `retriever.commands`."""

import sys


def main() -> None:
    """Run the command line; say what to install where the light client alone is."""
    try:
        from retriever.commands import app  # noqa: PLC0415  (the light client lacks what it needs)
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is missing: run `pip install 'foredraft[server]'`")
    app(prog_name="python -m retriever")


if __name__ == "__main__":
    main()
