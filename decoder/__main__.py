"""Runs this package's own commands as `python -m decoder`; users type `foredraft`."""

from indexer.launch import launch

if __name__ == "__main__":
    launch("decoder.commands", "decoder")
