"""The single-controller training loop, checkpoints and metrics."""
