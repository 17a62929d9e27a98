"""The client's side of the service: how it connects."""
