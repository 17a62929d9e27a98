"""The stages of a build, each a function of values that travel between processes."""
