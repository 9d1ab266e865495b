"""An engine inside this process over any Hugging Face causal LM: continuous batching on CPU or GPU."""
