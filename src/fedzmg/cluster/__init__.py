"""The same studies, grids and runs on many GPUs and machines, through Ray."""
