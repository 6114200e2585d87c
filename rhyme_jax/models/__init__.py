"""The pure-JAX decoder: configuration, parameters, forward pass, weights and tokenizers."""
