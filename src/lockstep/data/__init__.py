"""The order of data, samplers and data modules."""
