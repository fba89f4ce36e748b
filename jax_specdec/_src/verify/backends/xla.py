"""`Xla`: the backend by XLA that suits a platform."""

from __future__ import annotations

from jax_specdec._src.base.platform import Platform
from jax_specdec._src.verify.backends.gather import Gather
from jax_specdec._src.verify.backends.in_order import InOrder
from jax_specdec._src.verify.backends.tiles import Tiles

_ON = {"cpu": InOrder(), "tpu": Tiles()}


class Xla(Gather):
    """`InOrder` on CPUs, `Tiles` on TPUs, and `Gather` on all others."""

    def on(self, platform: Platform) -> Gather:
        return _ON.get(platform, Gather())
