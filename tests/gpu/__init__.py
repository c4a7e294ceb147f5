"""The ring that needs a CUDA device: many tiles, many configurations, streams, graphs, and very large tensors."""
