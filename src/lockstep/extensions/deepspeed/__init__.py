"""Training with DeepSpeed's engine: the strategy, the engine's config, and its checkpoint folders."""
