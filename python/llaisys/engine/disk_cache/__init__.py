"""The disk tier of the prefix cache: which blocks are on disk (block_index), their files (block_store), and
what moves between disk and KV cache (disk_cache)."""
