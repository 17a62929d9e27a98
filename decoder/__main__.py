"""`python -m decoder`: see `decoder.commands`."""

from indexer.launch import launch

if __name__ == "__main__":
    launch("decoder", "decoder")
