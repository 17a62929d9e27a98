"""`python -m indexer`: the commands of this package alone; users type `foredraft`."""

from indexer.launch import launch

if __name__ == "__main__":
    launch("indexer.commands", "index")
