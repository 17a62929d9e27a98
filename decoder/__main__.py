"""`python -m decoder`: only the commands of this package; users type `foredraft`."""

from indexer.launch import launch

if __name__ == "__main__":
    launch("decoder.commands", "decoder")
