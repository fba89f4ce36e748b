"""What a TPU reads rows by: two kernels, written in Pallas.

``support`` says which calls they serve, ``kernels`` is what `verify.xla` asks, ``statistics`` reads
target rows and ``residual`` the rows that are drawn from. All else is `verify.xla`. Kernels are
imported only if a call names them, because Pallas is slow to import.
"""
