"""The path at which sharded optimizers were."""
