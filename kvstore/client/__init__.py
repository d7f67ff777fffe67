"""The SDK: what engines and adapters import."""
