"""Recorded traffic as token ids: reading it from files, and spooling it to disk."""
