"""Which node and shard holds a block: membership and placement, pure functions."""
