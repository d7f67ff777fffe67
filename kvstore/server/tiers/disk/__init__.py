"""The SSD tier: payload in slab files, everything else in RocksDB, all of it in one worker process per shard."""
