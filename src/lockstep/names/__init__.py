"""Names of Lightning: where lockstep has them, or why it does not have them."""
