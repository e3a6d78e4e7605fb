"""What a GPU computes: one Triton kernel, or family of kernels, per file; `reference.py` says the same in plain torch.

Every module here imports without Triton and without a GPU (`launch.py`). Functions take tensors of one device, write
into tensors of the caller's, allocate nothing and never wait for the device, so that a CUDA graph can record them.
"""
