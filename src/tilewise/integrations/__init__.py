"""tilewise in existing models: torch's own attention, Hugging Face's libraries, vLLM and SGLang.

Modules are imported on use; each says which versions it was tested with.
"""
