"""The vocabulary of a federation: tasks, messages, methods, shards and local work."""
