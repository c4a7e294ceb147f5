"""Attention over a KV cache, dense or paged: what a caller says (`api`), the checks, the ops."""
