"""The draft service: calls and streams of the wire contract, listening, start and shutdown."""
