"""Compiled programs, kept on disk between runs of the command line."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import jax


def keep_compiled_programs() -> None:
    """Turns on JAX's persistent compilation cache, unless its folder cannot be written.

    The folder is `jax_specdec` in the user's cache directory. It is for the user alone, because
    whoever can write to it can run code as the user. JAX_COMPILATION_CACHE_DIR names another one,
    which is used as it is.
    """
    # A file cut short by an interrupt or a full disk costs a compilation, and needs no warning.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    # JAX has read JAX_COMPILATION_CACHE_DIR.
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # A relative path is to be ignored, as the specification of XDG says.
        parent = cache_home if cache_home.is_absolute() else Path.home() / ".cache"
        directory = parent / "jax_specdec"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # It may have been there, and be somebody else's, who could then change programs in it.
        if not os.access(directory, os.W_OK | os.X_OK) or directory.stat().st_uid != os.getuid():
            return
    except (OSError, RuntimeError, ValueError):  # no home directory, or a read-only one
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX's default keeps what took a second or more; most programs of small models take less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
