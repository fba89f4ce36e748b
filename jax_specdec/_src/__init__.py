"""Implementation of jax_specdec; import from the package itself."""
