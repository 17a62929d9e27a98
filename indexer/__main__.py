"""Runs only this package's commands, with `python -m indexer`; users run `foredraft`."""

from indexer.launch import launch

if __name__ == "__main__":
    launch("indexer.commands", "index")
