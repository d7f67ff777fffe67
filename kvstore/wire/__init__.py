"""The wire contract: frames and messages of the data path, gRPC mapping of the control plane, session tokens."""
