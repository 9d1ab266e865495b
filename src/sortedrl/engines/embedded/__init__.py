"""An in-process engine for any Hugging Face causal LM: continuous batching on CPU or GPU."""
