"""The real SGLang server on a plain CPU, small checkpoints, and pytest fixtures around both.

Importing this package, or any module of it but `cpu_platform`, imports neither sglang nor torch.
"""
