"""The budget: how much of a draft pays on this machine, by measured costs and calibration."""
