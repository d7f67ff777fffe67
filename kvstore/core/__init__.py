"""The nouns everyone shares: namespace, layout, block keys, states, errors, sizes, clock. Imports no other room."""
