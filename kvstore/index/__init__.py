"""The block index in shared memory: one writer, lock-free vectorised readers in any process."""

from kvstore.index.layout import buckets_for, index_bytes
from kvstore.index.reader import Entry, IndexReader, Probe
from kvstore.index.writer import IndexWriter

__all__ = ["Entry", "IndexReader", "IndexWriter", "Probe", "buckets_for", "index_bytes"]
