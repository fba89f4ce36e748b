"""What a TPU reads rows by: one kernel, written in Pallas.

``support`` says which calls it serves, ``statistics`` is the kernel. It is a reader: all else is
`verify.xla`. `statistics` is imported only if a call names it, because Pallas is slow to import.
"""
