"""Recorded traffic as token ids: read from files, and kept on disk meanwhile."""
