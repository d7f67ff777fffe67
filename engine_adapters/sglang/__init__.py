"""SGLang: a HiCache storage backend over the store. See docs/sglang.md.

The engine loads `engine_adapters.sglang.backend`, class `KvStoreHiCache`, by itself; nothing is imported from here.
"""
