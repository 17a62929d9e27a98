"""Running a service: its settings, life, logs, metrics, traces and status page."""
