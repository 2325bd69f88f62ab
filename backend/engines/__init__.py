"""The training engines: their configuration files and what they shard."""
