"""Ten minutes of a service at full load, judged."""
