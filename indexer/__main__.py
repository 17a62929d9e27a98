"""`python -m indexer`: only the commands of this package; users run `foredraft`."""

from indexer.launch import launch

if __name__ == "__main__":
    launch("indexer.commands", "index")
