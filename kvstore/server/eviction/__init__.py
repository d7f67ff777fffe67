"""Eviction policies. They only choose victims; the shard decides and acts."""
