"""Distributions over pytrees, and what is known of them in closed form; nothing here has heard of clients."""
