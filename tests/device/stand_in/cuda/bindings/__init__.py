"""A package and no namespace, so that it comes before the real one where that is installed."""
