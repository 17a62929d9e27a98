"""Which drafted tokens are kept: rules that leave the distribution of the output alone."""
