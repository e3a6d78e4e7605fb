"""What `deploy/gpu_check.py` runs: a file per section, each a generator of tables, notes and problems.

Needs torch, Triton, numpy, safetensors and what of this project needs no more than these.
"""
