"""`python -m retriever` runs only the commands of this package; users type `foredraft`."""

from indexer.launch import launch

if __name__ == "__main__":
    launch("retriever.commands", "server")
