"""One shard: its state (`Shard`), its pool (`SlotAllocator`), and the process that owns both."""
