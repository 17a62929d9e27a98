"""Operation of a service: settings, lifecycle, logs, metrics, traces and the status page."""
