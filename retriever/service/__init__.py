"""The draft service: what answers on the wire, where it listens, how it starts and ends."""
