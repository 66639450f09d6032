"""What a block is made of: how the pages of a device pool map to the bytes of a block.

    base     the description every layout yields: buffers by base, strides and sizes
    gqa      multi-head, grouped-query and multi-query pools: K and V apart
    detect   which layout belongs to which pool class; unknown classes are refused by name

The fused layout of latent attention is `hpkv_sglang.mla.layout`. Nothing here imports SGLang or
touches device memory; pools are read once, at start.
"""
