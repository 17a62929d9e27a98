"""Runs `python -m foredraft`; see `foredraft.program`."""

from foredraft.program import main

if __name__ == "__main__":
    main()
