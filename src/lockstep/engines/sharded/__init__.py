"""Strategies with sharded parameters: FSDP with `fully_shard`, tensor parallelism and 2-D meshes."""
