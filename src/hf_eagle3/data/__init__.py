"""From data sets to what the trainer needs."""

from .vocabulary import most_frequent_tokens


__all__ = ["most_frequent_tokens"]
