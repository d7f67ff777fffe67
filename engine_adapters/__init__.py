"""Adapters between the store and inference engines, one sub-package per engine. The core never imports them."""
