"""Ascend NPUs: pools whose pages are apart from CUDA's, and copies through torch's streams.

mha      the paged pool of multi-head and grouped-query attention
mla      the split pool of latent attention, NoPE and RoPE apart, row by row or in NZ order
engine   the copy engine's interface: a staging area in host memory between device and pool
spills   device to pool, two threads          loads   pool to device, two threads
tickets  what callers hold                    staging what the threads share
transfer how the pages of a layer are copied
streams  what all of them need of a device: streams, events, pinned memory, page copies
"""
