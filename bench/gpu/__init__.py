"""The sections that `deploy/gpu_check.py` runs: one file each, whose function yields tables, notes and problems.

They need torch, Triton, numpy and safetensors, and import only modules of this project that need no more.
"""
