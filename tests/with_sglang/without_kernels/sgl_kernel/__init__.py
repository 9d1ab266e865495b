from absent import put_in_place

put_in_place(__name__, "mamba", "flash_attn", "utils", "quantization", "elementwise", "scalar_type", "kvcacheio")
