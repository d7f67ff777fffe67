"""Memory of accelerators behind one port: CUDA, or the host's own memory, so that all logic runs without a GPU."""
