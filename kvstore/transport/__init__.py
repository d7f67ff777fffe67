"""Moving bytes: shared memory, sockets, vectorised copies, and the links from a client to a shard."""
