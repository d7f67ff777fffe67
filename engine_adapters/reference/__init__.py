"""A small paged engine on torch, for models of the Llama family: continuous batching, chunked prefill, its own prefix
cache, and the store beside every layer. It is made to be read, and to be taken apart: layers and KV heads are separate.

See docs/reference-engine.md.
"""

from engine_adapters.reference.engine import Answer, Engine
from engine_adapters.reference.scheduler import Limits

__all__ = ["Answer", "Engine", "Limits"]
