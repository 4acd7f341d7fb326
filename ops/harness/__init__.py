"""Running deployments, measured values and tables, for benches, chaos runs, checks and tests."""
