"""OpenTelemetry traces of sampled calls and steps."""
