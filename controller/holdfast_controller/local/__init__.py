"""The embedded engine: jobs in SQLite, attempts as torchrun processes on this machine."""
