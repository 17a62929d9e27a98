"""Other systems' own programs beside our drafter, on the same recordings in one run."""
