"""Parameters in shards: FSDP over `fully_shard`, tensor parallel and 2-D meshes."""
