"""How a kernel for Mosaic GPU is written.

- ``gpus``: which GPUs kernels run on; read without any kernel. A new generation begins here.
- ``threads``: the operations of a warpgroup's threads.
- ``ptx``: these on a GPU, also those that Pallas lacks, such as loads of several entries at once.
- ``interpret``: these in jnp, for GPU interpret mode.
"""
