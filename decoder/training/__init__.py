"""Training a speculator: a target teaches it on texts and on its own outputs."""
