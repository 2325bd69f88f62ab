"""Rules of distributed training: strategies, sharding, meshes, and extra engine configuration."""
