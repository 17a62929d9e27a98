"""The compiled inner loops of the drafters that run beside the target."""
