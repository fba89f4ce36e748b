"""Log-probabilities of emitted tokens and of the likeliest alternatives, and what was kept."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_specdec._src.base import ragged
from jax_specdec._src.base.arrays import (
    Sizes,
    check_array,
    check_choice,
    check_int,
    check_tree,
    check_type,
    pytree,
    require,
    static_pytree,
)
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.platform import Platform, traced_for_platform
from jax_specdec._src.base.sampling import Filter, SamplingParams, inverse_temperature
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID, Array, Drafts, RejectionSampleOutput
from jax_specdec._src.rows.device import Device
from jax_specdec._src.rows.part import of_owner, part_of
from jax_specdec._src.rows.rows import VocabRows
from jax_specdec._src.verify import sharding as sharding_lib
from jax_specdec._src.verify.backends.gather import Gather
from jax_specdec._src.verify.backends.xla import Xla
from jax_specdec._src.verify.call import CallSettings, Static, check_arrays
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec._src.verify.statistics import Partials

Distribution = Literal["raw", "processed"]


@static_pytree
@dataclasses.dataclass(frozen=True)
class LogprobsConfig:
    """Which log-probabilities to compute besides those of the emitted tokens. Static.

    Attributes:
      num_top: how many of the likeliest tokens at each position.
      distribution: "raw" for the model's distribution, "processed" for the one that the token was
        drawn from; see `token_logprobs`.
      thresholds: whether to return what divides the logits that min-p, top-k and top-p kept from
        the others, for a trainer that masks the same ids; see `TokenLogprobs`. For "processed".

    Raises:
      TypeError: `num_top` is not an integer, or `thresholds` no bool.
      ValueError: `num_top` is negative, `distribution` is neither of the two, or `thresholds` come
        with "raw", which nothing truncates.

    Example:
      >>> import jax_specdec as sd
      >>> sd.LogprobsConfig(num_top=5).distribution
      'raw'
    """

    num_top: int = 0
    distribution: Distribution = "raw"
    thresholds: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_top", check_int("num_top", self.num_top, 0))
        check_choice("distribution", self.distribution, get_args(Distribution))
        check_type("thresholds", self.thresholds, bool)
        is_truncated = self.distribution == "processed" or not self.thresholds
        require(is_truncated, "thresholds", 'be False with distribution "raw"', self.thresholds)


@pytree(
    logprobs="[B, K+1] float32",
    top_token_ids="[B, K+1, n] int32",
    top_logprobs="[B, K+1, n] float32",
    thresholds="[B, K+1] float32",
)
@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the tokens that one verification emitted.

    Attributes:
      logprobs: ``[B, K+1]`` float32, natural logarithms; NaN where no token was emitted. With
        ``jax_debug_nans`` a function under `jax.jit` cannot return NaN: it may return `as_bits`.
      top_token_ids: ``[B, K+1, n]`` int32, the n likeliest tokens, most likely first, ties to the
        lowest id; -1 where no token was emitted, and for tokens of probability 0.
      top_logprobs: ``[B, K+1, n]`` float32, their log-probabilities; NaN where no token was
        emitted, -inf for tokens of probability 0.
      thresholds: ``[B, K+1]`` float32, for each token: of the ids that the bitmask allows, min-p,
        top-k and top-p kept those with ``float32(row) >= threshold``, where ``row`` are the logits
        that were verified, after penalties and before the temperature. It lies halfway between the
        least logit that was kept and the largest that was not, or is the former where no float32
        lies between; filters keep all ids of equal logits or none, so these always differ.
        -inf where none was left out, as for greedy requests, which no filter changes; NaN where no
        token was emitted. None unless asked for.

    Example:
      A request whose one token had probability 1/2, the likeliest of its row:

      >>> import numpy as np
      >>> import jax_specdec as sd
      >>> found = sd.TokenLogprobs(
      ...     logprobs=np.log([[0.5, np.nan]]), top_token_ids=np.array([[[7], [-1]]]),
      ...     top_logprobs=np.log([[[0.5], [np.nan]]]))
      >>> own = found.of(0, num_tokens=1)
      >>> np.exp(own.logprobs).tolist(), own.top_token_ids.tolist()
      ([0.5], [[7]])
    """

    logprobs: jax.Array
    top_token_ids: jax.Array
    top_logprobs: jax.Array
    thresholds: jax.Array | None = None

    def of(self, request: int, num_tokens: int) -> TokenLogprobs:
        """Returns those of one request's first n tokens: ``[n]`` and ``[n, num_top]``.

        Raises:
          TypeError: `request` or `num_tokens` is not an int.
          ValueError: one is out of range.
        """
        batch, most = np.shape(self.logprobs)
        check_int("request", request, 0, batch - 1)
        check_int("num_tokens", num_tokens, 0, most)
        return jax.tree.map(lambda x: x[request, :num_tokens], self)

    def where(self, is_kept: jax.Array) -> TokenLogprobs:
        """Returns them with NaN and -1 where ``is_kept [B, K+1]`` is false."""
        top = is_kept[:, :, None]
        return TokenLogprobs(
            jnp.where(is_kept, self.logprobs, jnp.nan),
            jnp.where(top, self.top_token_ids, PLACEHOLDER_TOKEN_ID),
            jnp.where(top, self.top_logprobs, jnp.nan),
            jax.tree.map(lambda x: jnp.where(is_kept, x, jnp.nan), self.thresholds),
        )

    def as_bits(self) -> TokenLogprobs:
        """Returns them with numbers as int32 of the same bits, as a program of ours returns them.

        ``jax_debug_nans`` takes NaN that a program returns for a fault of it.
        """
        return self._with_numbers(lambda x: lax.bitcast_convert_type(x, jnp.int32))

    def of_bits(self) -> TokenLogprobs:
        """Returns arrays of the host as they were before `as_bits`."""
        return self._with_numbers(lambda x: np.asarray(x).view(np.float32))

    def _with_numbers(self, changed: Callable[[Any], Any]) -> TokenLogprobs:
        """Returns them with every array of numbers changed; ids stay."""
        return TokenLogprobs(
            changed(self.logprobs),
            self.top_token_ids,
            changed(self.top_logprobs),
            jax.tree.map(changed, self.thresholds),
        )


class Emitted(NamedTuple):
    """One emitted token, and the row that it was drawn from. Batched, with leading axes.

    Attributes:
      exists: ``[]`` bool, whether a token was emitted and has a row.
      row: ``[]`` int32, target row.
      token_id: ``[]`` int32.
      inv_temperature: ``[]`` float32.
      filter: min-p, top-k and top-p, or None.
    """

    exists: jax.Array
    row: jax.Array
    token_id: jax.Array
    inv_temperature: jax.Array
    filter: Filter | None


def token_logprobs(
    target_logits: Array,
    drafts: Drafts,
    output: RejectionSampleOutput,
    *,
    sampling: SamplingParams,
    config: SpecDecodeConfig,
    num_top: int = 0,
    distribution: Distribution = "raw",
    thresholds: bool = False,
    vocab_size: int | None = None,
    token_bitmask: Array | None = None,
    padded_rows: bool = False,
    sharding: VerifySharding | None = None,
) -> TokenLogprobs:
    """Returns log-probabilities of emitted tokens, and of the likeliest alternatives to each.

    ``"raw"`` is ``log softmax(float32(row))`` of the rows as given, at temperature 1 and without
    the bitmask. ``"processed"`` is the distribution that the tokens were drawn from: the masked row
    at the request's temperature, filtered by min-p, top-k and top-p. A greedy request has no such
    distribution; its rows are read at temperature 1, unfiltered.

    For log-probabilities before penalties, give the rows from before `process_logits`; for those
    after penalties, give the rows that were verified.

    Arguments that `rejection_sample` has too are those of its call.

    Args:
      target_logits: ``[N+B, V]``; ``[N, V]`` if the call had `bonus_token_ids`.
      output: what the call returned.
      num_top: n, static, the number of alternatives, 0 to V.
      distribution: "raw" or "processed", static.
      thresholds: whether to return what the filters kept, static; for "processed".
      padded_rows: of the call; for logits with bonus rows.
      sharding: of the call. Logits that are split over the vocabulary stay where they are: devices
        exchange sums, and their `num_top` likeliest tokens.

    Returns:
      `TokenLogprobs`. A bonus token that the caller gave has no row, so it gets NaN and -1.

    Raises:
      TypeError: an argument of the wrong type or dtype, at trace time.
      ValueError: shapes that do not fit, or a value out of range, at trace time.

    Numerics:
      Sums are float32. Only rows that emitted a token are read: on the CPU one after another, on
      other devices, or if the vocabulary is split, B at a time. Derivatives with respect to
      `target_logits` and the temperature are those of ``log softmax`` over the tokens that mask and
      filters keep, and 0 where no token was emitted; those of thresholds are 0. They read all rows
      at once.

      The filters are applied anew, with sums in another order than the verification's: where a mass
      equals top-p's share but for rounding, one may keep an entry more than the other.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> drafts = sd.Drafts.from_flat(jnp.array([2]), jnp.array([1]))
      >>> logits = jnp.log(jnp.array([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]))
      >>> given = dict(
      ...     sampling=sd.SamplingParams(temperature=jnp.zeros(1)),
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=1))
      >>> output = sd.rejection_sample(
      ...     logits, drafts, keys=jax.random.split(jax.random.key(0), 1),
      ...     positions=jnp.array([5]), **given)
      >>> found = sd.token_logprobs(logits, drafts, output, num_top=2, **given)
      >>> jnp.exp(found.logprobs).tolist(), found.top_token_ids.tolist()
      ([[0.5, 0.5]], [[[2, 0], [0, 1]]])

      A trainer normalizes its own logits over the ids that the sampler kept: with top-k of 1, one
      of the first row and two equal ones of the second.

      >>> sampled = given | dict(sampling=sd.SamplingParams(0.8, top_k=1))
      >>> rows = jnp.log(jnp.array([[0.2, 0.3, 0.5], [0.4, 0.4, 0.2]]))
      >>> output = sd.rejection_sample(
      ...     rows, drafts, keys=jax.random.split(jax.random.key(0), 1),
      ...     positions=jnp.array([5]), **sampled)
      >>> found = sd.token_logprobs(
      ...     rows, drafts, output, distribution="processed", thresholds=True, **sampled)
      >>> is_kept = rows >= found.thresholds[0][:, None]  # [K+1, V]
      >>> log_p = jax.nn.log_softmax(jnp.where(is_kept, rows / 0.8, -jnp.inf))
      >>> jnp.exp(log_p).tolist(), jnp.exp(found.logprobs).tolist()
      ([[0.0, 0.0, 1.0], [0.5, 0.5, 0.0]], [[1.0, 0.5]])
    """
    wanted = LogprobsConfig(num_top, distribution, thresholds)
    check_type("padded_rows", padded_rows, bool)
    of_output: Sizes = {}
    check_tree("output", output, (RejectionSampleOutput,), of_output)
    bonus = None
    if not padded_rows and isinstance(drafts, Drafts):
        own, ids = (getattr(x, "shape", ()) for x in (target_logits, drafts.token_ids))
        if own[:1] == ids:  # a bonus was given
            bonus = jnp.zeros((of_output["B"],), jnp.int32)
    settings = CallSettings(config, vocab_size, padded_rows, sharding=sharding)
    arrays, sizes = check_arrays(
        CallArrays.given(target_logits, drafts, None, sampling, bonus, None, token_bitmask),
        settings,
    )
    sizes["K"] = config.num_speculative_tokens
    check_array("output.token_ids", output.token_ids, "[B, K+1]", sizes)
    must = "be there if and only if drafts.parents are"
    is_path = (output.path is None) == (drafts.parents is None)
    require(is_path, "output.path", must, output.path)
    check_int("num_top", num_top, 0, sizes["size"])
    # Draft rows are not read, however they are split.
    no_rows = dataclasses.replace(drafts, distribution=None)
    static = Static.of(
        dataclasses.replace(arrays, drafts=no_rows), settings._replace(vocab_size=sizes["size"])
    )
    return emitted_logprobs(arrays, static, output, wanted)


def emitted_logprobs(
    arrays: CallArrays, static: Static, output: RejectionSampleOutput, wanted: LogprobsConfig
) -> TokenLogprobs:
    """Returns what `token_logprobs` does, of arrays that need no checks.

    Args:
      arrays: of the call of `verify`, with temperatures; its randomness is not read.
      static: of the call.
      output: what the call returned.
      wanted: which log-probabilities.
    """
    target_logits, token_bitmask = jax.tree.map(
        jnp.asarray, (arrays.target_logits, arrays.token_bitmask)
    )
    drafts = arrays.drafts
    temperature = arrays.sampling.temperature
    k = static.config.num_speculative_tokens
    n = drafts.token_ids.shape[0]
    batch = output.num_emitted.shape[0]
    shape = (batch, k + 1)
    # No row was read, so no token has one.
    if target_logits.shape[0] == 0 or batch == 0:
        return TokenLogprobs(
            jnp.full(shape, jnp.nan, jnp.float32),
            jnp.full((*shape, wanted.num_top), PLACEHOLDER_TOKEN_ID, jnp.int32),
            jnp.full((*shape, wanted.num_top), jnp.nan, jnp.float32),
            jnp.full(shape, jnp.nan, jnp.float32) if wanted.thresholds else None,
        )
    # [B]: the first row of each request, and how many it owns
    has_bonus_rows = arrays.bonus_token_ids is None
    layout = ragged.unpack(drafts, k, has_bonus_rows)
    offset = jnp.arange(k + 1, dtype=jnp.int32)[None, :]
    num_rows = layout.num_drafts + int(has_bonus_rows)
    # [B]: what the row is scaled by, and the filters; of "raw", neither they nor the mask
    inv_temperature = jnp.ones((batch,), jnp.float32)
    filter = None
    if wanted.distribution == "processed":
        greedy = temperature == 0  # at temperature 1: 1 / 0 would have no derivative
        inv_temperature = inverse_temperature(jnp.where(greedy, 1.0, temperature))
        filter = Filter.of(arrays.sampling)
        filter = filter and filter.where(~greedy)
    else:
        token_bitmask = None

    def per_token(x: jax.Array) -> jax.Array:
        """Returns ``[B]`` as ``[B, K+1]``."""
        return jnp.broadcast_to(x[:, None], shape)

    # [B, K+1]: the row of each token, of those that its request owns; of a tree, that of a node
    place = offset if output.path is None else jnp.maximum(output.path, 0)
    emitted = Emitted(
        exists=offset < jnp.minimum(output.num_emitted, num_rows)[:, None],
        row=layout.first_row[:, None] + place,
        token_id=output.token_ids,
        inv_temperature=per_token(inv_temperature),
        filter=jax.tree.map(per_token, filter),
    )

    # How the logits are split decides where they are read.
    mesh, vocab_axis, batch_axis = static.layout[:3]

    # Over a mesh, each device reads the rows of its own requests, and its own columns of them.
    def read(arrays: tuple[jax.Array, jax.Array | None, Emitted]) -> TokenLogprobs:
        return read_emitted(*arrays, static.size, wanted, vocab_axis)

    given = target_logits, token_bitmask, emitted
    if mesh is None:
        with jax.debug_nans(False):  # NaN is what it returns where no token was emitted
            return sharding_lib.without_vma(read, given, vocab_axis)

    def on_part(arrays: tuple[jax.Array, jax.Array | None, Emitted]) -> TokenLogprobs:
        logits, words, emitted = arrays
        if batch_axis is not None:
            # Rows were counted over the whole batch: the part's first row is row 0 here.
            all_rows = n + int(has_bonus_rows) * batch
            of_part = all_rows // sharding_lib.num_devices(mesh, batch_axis)
            emitted = emitted._replace(row=emitted.row - lax.axis_index(batch_axis) * of_part)
        return read((logits, words, emitted))

    own = P(batch_axis)
    specs = P(batch_axis, vocab_axis), own, own
    with jax.debug_nans(False):
        return sharding_lib.over_mesh(on_part, mesh, specs, own, given)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def read_emitted(
    target_logits: jax.Array,
    token_bitmask: jax.Array | None,
    emitted: Emitted,
    size: int,
    wanted: LogprobsConfig,
    axis: str | None,
) -> TokenLogprobs:
    """Returns log-probabilities of emitted tokens ``[B, K+1]``, from their rows.

    Args:
      target_logits: ``[M, V]``, M at least 1, or this device's columns of them.
      token_bitmask: ``[M, ceil(V/32)]`` or None.
      emitted: the tokens.
      size: ids from it on are padding; at most V.
      wanted: of each row.
      axis: the mesh axis that the vocabulary is split over, or None.
    """
    arrays = target_logits, token_bitmask, emitted
    return traced_for_platform(_read_emitted, arrays, size, wanted, axis)


def _read_emitted(
    arrays: tuple[jax.Array, jax.Array | None, Emitted],
    size: int,
    wanted: LogprobsConfig,
    axis: str | None,
    platform: Platform,
) -> TokenLogprobs:
    """Does `read_emitted`: on a CPU row by row, elsewhere, or if rows are split, B at a time."""
    target_logits, token_bitmask, emitted = arrays
    backend = Xla().on(platform)
    rows = _rows(target_logits, size, token_bitmask, axis, backend.device)
    if platform == "cpu" and axis is None:
        # [B, K+1] -> [B * (K+1)]: a row that emitted no token is -1, and is not read
        flat = jax.tree.map(lambda x: x.reshape(-1), emitted)
        which = jnp.where(flat.exists, flat.row, -1)
        found = backend.device.in_blocks(
            lambda those: _read_batch(rows, those, wanted, backend), which, flat
        )
        # [B * (K+1), ...] -> [B, K+1, ...]
        shape = emitted.row.shape
        found = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)
        return found.where(emitted.exists)
    # [B, K+1] -> [K+1, B]: one batch for each place among the emitted tokens
    turned = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), emitted)
    found = lax.map(lambda those: _read_batch(rows, those, wanted, backend), turned)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)


@read_emitted.defjvp
def _derivative(
    size: int, wanted: LogprobsConfig, axis: str | None, primals: Any, tangents: Any
) -> tuple[TokenLogprobs, TokenLogprobs]:
    """Returns ``d logprob(id) = dz(id) - sum(p * dz)``, where ``z = logit / temperature``.

    The rows are gathered once: the derivative of a loop would add a matrix ``[M, V]`` per token.
    """
    found = read_emitted(*primals, size, wanted, axis)
    target_logits, token_bitmask, emitted = primals
    backend = Gather()
    # [T]: the T = B * (K+1) tokens
    one = jax.tree.map(lambda x: x.reshape(-1), emitted)
    rows = _rows(target_logits, size, token_bitmask, axis, backend.device)
    of_part, kept = _partials(rows, one, backend)
    stats = Partials.of_whole(rows.part.gather(of_part), one.inv_temperature)
    # [T, W]: this part's columns of the rows, -inf where mask or filters left an entry out
    x = _kept_entries(rows, one, kept)
    # [T, 1]: a row whose maximum is not finite has no distribution
    is_known = (one.exists & jnp.isfinite(stats.max))[:, None]
    is_kept = is_known & (x > -jnp.inf)
    # [T, W]: p = exp(z - max z) / sum, 0 where nothing is kept, so that no NaN goes on from there
    inv = one.inv_temperature[:, None]
    p = jnp.exp((x - stats.max[:, None]) * inv) / stats.sum[:, None]
    x, p = (jnp.where(is_kept, y, 0.0) for y in (x, p))

    # [T, W]: dz = d logit / temperature + logit * d (1 / temperature), of the tokens' rows only
    d_logits, _, d_emitted = tangents
    row = jnp.clip(one.row, 0, target_logits.shape[0] - 1)
    dz = d_logits[row][:, : rows.width].astype(jnp.float32) * inv
    dz = jnp.where(is_kept, dz + x * d_emitted.inv_temperature.reshape(-1, 1), 0.0)
    # [T, 1]: sum(p * dz) over all parts
    mean = rows.part.sum(jnp.sum(p * dz, axis=1, keepdims=True))

    def at(ids: jax.Array) -> jax.Array:
        """Returns the derivatives of ids ``[B, K+1]`` or ``[B, K+1, n]``."""
        # [T, n]: dz at the ids, which one part alone has columns of; the others add 0
        each = ids.reshape(*row.shape, -1)
        place = rows.part.columns(each)
        is_here = (place >= 0) & (place < rows.width)
        own = jnp.take_along_axis(dz, jnp.clip(place, 0, rows.width - 1), axis=1)
        own = rows.part.sum(jnp.where(is_here, own, 0.0)) - mean
        return jnp.where(is_known & (each >= 0), own, 0.0).reshape(ids.shape)

    no_derivative: Any = np.zeros(found.top_token_ids.shape, jax.dtypes.float0)
    own = at(emitted.token_id)
    top = at(found.top_token_ids)
    constant = jax.tree.map(jnp.zeros_like, found.thresholds)
    return found, TokenLogprobs(own, no_derivative, top, constant)


def _rows(
    target_logits: jax.Array,
    size: int,
    token_bitmask: jax.Array | None,
    axis: str | None,
    device: Device,
) -> VocabRows:
    """Returns the target rows, or this device's part of them."""
    part = part_of(axis, target_logits.shape[1])
    return VocabRows(target_logits, size, -jnp.inf, device, token_bitmask, None, part)


def _partials(
    rows: VocabRows, those: Emitted, backend: Gather
) -> tuple[Partials, jax.Array | None]:
    """Returns partials of this part, of the rows of tokens ``[n]``, and thresholds or None."""
    inv = those.inv_temperature
    kept = None
    # [n]: the maximum of each row, and then sums relative to it over what the filters kept
    peak = backend.peak(rows, those.row)
    if those.filter is not None:
        kept = backend.thresholds(rows, those.row, those.filter, those.exists, peak, inv)
    return Partials(peak, backend.exp_sums(rows, those.row, peak, inv, kept)).checked(), kept


def _kept_entries(rows: VocabRows, those: Emitted, kept: jax.Array | None) -> jax.Array:
    """Returns rows of tokens ``[n]``, this part ``[n, W]``, -inf below thresholds ``[n]``."""
    x = rows.whole(those.row)
    return x if kept is None else jnp.where(x < kept[:, None], -jnp.inf, x)


def _read_batch(
    rows: VocabRows, those: Emitted, wanted: LogprobsConfig, backend: Gather
) -> TokenLogprobs:
    """Returns log-probabilities of one token of each request: ``[B]`` and twice ``[B, n]``."""
    inv = those.inv_temperature
    num_top = wanted.num_top
    of_part, kept = _partials(rows, those, backend)
    # [B]: the token's own entry, and maximum and sum of its row
    own = rows.at(those.row, those.token_id)
    stats = of_part
    if rows.part.is_split:
        # [D, B] of D parts: the entry is that of the part that has the token's column.
        parts, entries = rows.part.gather((of_part, own))
        stats = Partials.of_whole(parts, inv)
        own = of_owner(entries, those.token_id, rows.width)
    # [B]: as in `_derivative`
    is_known = those.exists & jnp.isfinite(stats.max)

    def logprobs(entries: jax.Array) -> jax.Array:
        """Returns the log-probabilities of entries ``[B, n]`` of the rows."""
        # log p = (x - max x) / temperature - log sum exp((x - max x) / temperature)
        found = (entries - stats.max[:, None]) * inv[:, None] - jnp.log(stats.sum)[:, None]
        return jnp.where(is_known[:, None], found, jnp.nan)

    own = own if kept is None else jnp.where(own < kept, -jnp.inf, own)
    # [B] -> [B, 1] -> [B]
    own = logprobs(own[:, None])[:, 0]
    batch = those.row.shape[0]
    # [B, n]: the likeliest tokens, -inf and -1 where there are none
    top = jnp.full((batch, num_top), -jnp.inf, jnp.float32)
    ids = jnp.full((batch, num_top), PLACEHOLDER_TOKEN_ID, jnp.int32)
    if num_top:
        # [B, W]: the entries of this part that mask and filters kept
        entries = _kept_entries(rows, those, kept)
        entries = jnp.where(entries == 0, 0.0, entries)  # top_k puts 0.0 before -0.0
        # [B, min(n, W)]: the likeliest of this part; a part may have fewer columns than wanted
        top, columns = lax.top_k(entries, min(num_top, rows.width))
        found = columns.astype(jnp.int32)
        if rows.part.is_split:
            # [D, B, m] -> [B, D * m]: the likeliest of each part, in the order of the parts, so
            # that equal entries stand in the order of their ids; then the likeliest of those
            top, found = (
                jnp.moveaxis(x, 0, 1).reshape(batch, -1)
                for x in rows.part.gather((top, rows.part.ids(found)))
            )
            top, columns = lax.top_k(top, num_top)
            found = jnp.take_along_axis(found, columns.astype(jnp.int32), axis=1)
        # [B, n]: an entry of -inf has probability 0, and is no alternative
        is_token = those.exists[:, None] & (top > -jnp.inf)
        ids = jnp.where(is_token, found, PLACEHOLDER_TOKEN_ID)
    # [B]: what divides the kept entries from the others, -inf where none was left out
    thresholds = None
    if wanted.thresholds:
        if kept is None:
            thresholds = jnp.full((batch,), -jnp.inf)
        else:
            thresholds = _between(rows, those, kept)
        thresholds = jnp.where(is_known, thresholds, jnp.nan)
    return TokenLogprobs(own, ids, logprobs(top), thresholds)


def _between(rows: VocabRows, those: Emitted, kept: jax.Array) -> jax.Array:
    """Returns ``[B]`` float32, what divides the entries from `kept` on from those below.

    In the middle it also divides entries that were computed in another way, and differ a little.
    """
    # [B, W]: the entries of this part, and whether filters kept them
    x = rows.whole(those.row)
    is_kept = x >= kept[:, None]
    # [B]: over all parts, the least entry that was kept and the largest that was not
    lowest_kept = -rows.part.max(jnp.max(jnp.where(is_kept, -x, -jnp.inf), axis=1))
    highest_left_out = rows.part.max(jnp.max(jnp.where(is_kept, -jnp.inf, x), axis=1))
    # [B]: the threshold, halfway between the two.
    # Halves first: the sum of two large entries is infinite.
    middle = lowest_kept / 2 + highest_left_out / 2
    # Of two floats next to each other the middle is one or the other.
    is_between = (middle > highest_left_out) | jnp.isinf(highest_left_out)
    return jnp.where(is_between, middle, lowest_kept)
