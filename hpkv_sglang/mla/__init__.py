"""Multi-head latent attention (MLA): one latent vector per token instead of K and V.

`layout` describes the fused pool, NoPE and RoPE parts side by side.
"""
