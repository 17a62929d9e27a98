"""What decoders found likely, kept by tenant and model for their later runs."""
