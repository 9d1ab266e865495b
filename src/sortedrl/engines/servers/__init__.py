"""Engines behind an HTTP API: vLLM and SGLang servers that run already."""
