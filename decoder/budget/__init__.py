"""The budget: how much of a draft pays on this machine, from measured costs and calibration."""
