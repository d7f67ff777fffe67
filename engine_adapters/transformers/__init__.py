"""Hugging Face transformers: a prompt's KV out of a `DynamicCache` into the store, and back in another process.

    namespace = namespace_for(model, revision="<commit or digest of the weights>")
    with kvstore.connect("127.0.0.1:7400", namespace=namespace) as client:
        adapter = CacheAdapter(client, model)
        cache, hit_tokens = adapter.load(token_ids)             # a miss is an empty cache and 0
        output = model(input_ids=rest_of(token_ids, hit_tokens), cache=cache, use_cache=True)
        adapter.store(token_ids, cache)

See docs/transformers.md.
"""

from engine_adapters.transformers.cache import CacheAdapter, LoadResult, Prefill, namespace_for

__all__ = ["CacheAdapter", "LoadResult", "Prefill", "namespace_for"]
