"""Cost figures of a measured engine, and the simulator beside the run that they come from."""
