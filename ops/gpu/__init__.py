"""The prepared run on a GPU machine, and the checks of the CUDA path that need no GPU."""
