"""LMCache: a remote storage plugin that keeps its chunks in the store. See docs/lmcache.md.

`engine_adapters.lmcache.connector.KvStoreAdapter` is the class to name in LMCache's configuration.
"""
