"""The kvstore-server daemon: a node process, one process per shard, one per data port worker."""
