"""vLLM: a KV connector, so that every vLLM on the same store shares its cache.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvStoreConnector",
        "kv_connector_module_path": "engine_adapters.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"address": "10.0.0.5:7400"}}'

| module | its one job |
| --- | --- |
| `connector` | the class that vLLM loads: which side does what |
| `options` | `kv_connector_extra_config`, checked |
| `identity` | model, weights and settings as names that a namespace is made of |
| `geometry` | how a worker's KV lies in memory, and the namespace that follows from it |
| `matching` | lookups beside the scheduler's loop |
| `scheduling` | which blocks a step loads and saves |
| `worker` | moves them, layer by layer |
| `step` | what the two sides tell one another |
| `sight` | statistics, Prometheus, KV events |

See docs/vllm.md.
"""
