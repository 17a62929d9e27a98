"""`python -m indexer`: see `indexer.commands`."""

from indexer.launch import launch

if __name__ == "__main__":
    launch("indexer", "index")
