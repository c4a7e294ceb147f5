"""tilewise under the models that people have: torch's own attention, Hugging Face's libraries, vLLM and SGLang.

Nothing is imported until it is asked for; each module says which versions it was tested with.
"""
