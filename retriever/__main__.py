"""`python -m retriever`: see `retriever.commands`."""

from indexer.launch import launch

if __name__ == "__main__":
    launch("retriever", "server")
