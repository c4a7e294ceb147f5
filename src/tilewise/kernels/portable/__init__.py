"""The portable kernels, in Triton: any GPU it compiles for, and its interpreter on a CPU."""
