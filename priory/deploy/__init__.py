"""A federation over a network: what travels, and who carries it."""
