"""What is for TPUs alone, and no TPU has run: `verify.backends.tiles` is its one door.

``largest`` finds the largest entries of rows, among which thresholds nearly always are. ``support``
says which calls the kernels serve, ``statistics`` reads target rows and ``residual`` the rows that
are drawn from; ``blocks`` is what both are made of. Kernels are imported only if a call names them,
because Pallas is slow to import.
"""
