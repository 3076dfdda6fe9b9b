"""Sharded parameters: FSDP by `fully_shard`, tensor parallel and 2-D meshes."""
