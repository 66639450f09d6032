"""Ascend NPUs: pools whose pages are apart from CUDA's, and copies through torch's streams.

mha      the paged pool of multi-head and grouped-query attention
mla      the split pool of latent attention, NoPE and RoPE apart, row by row or in NZ order
streams  what the engine needs of a device: streams, events, pinned memory, page copies
engine   the copy engine's interface over those; a staging area between device and host pool
"""
