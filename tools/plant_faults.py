"""Plants faults one at a time and prints which test, long ones included, catches each.

    python tools/plant_faults.py [NAME...]

Of the checkout in the current directory, with the Python that runs this; all faults by default. A
fault replaces one function of the package, in the process of the tests that it names. Fails where a
fault is caught by none of them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec._src.attention import xla as attention_xla
from jax_specdec._src.attention.mosaic_gpu import BlockWork
from jax_specdec._src.base.noise import Stream

PLANTED = "PLANTED_FAULT"
"""The environment variable that names the fault in the process of the tests."""


@dataclasses.dataclass(frozen=True)
class Fault:
    function: str  # "module:name" or "module:Class.name", under jax_specdec
    tests: str  # what to run, under tests/
    wrong: Callable[..., Any]  # takes the function as it was, then its arguments


FAULTS: dict[str, Fault] = {}

BACKENDS = " ".join(
    f"verify/test_{name}.py"
    for name in ("backends", "edges", "bad_rows", "block_edges", "processed")
)
"""What every backend is held to."""


def fault(name: str, function: str, tests: str) -> Callable[[Callable[..., Any]], Any]:
    def add(wrong: Callable[..., Any]) -> None:
        FAULTS[name] = Fault(function, tests, wrong)

    return add


# Rules


@fault("a ratio equal to u is accepted", "_src.verify.rules:accepts", BACKENDS)
def _(right, u, p, q):
    return (q > 0) & (u * q <= p)


@fault("a draft that q cannot draw is accepted", "_src.verify.rules:accepts", BACKENDS)
def _(right, u, p, q):
    return u * q < p


@fault("greedy drafts are always accepted", "_src.verify.rules:accepts_greedy", BACKENDS)
def _(right, token_id, best_id):
    return token_id == token_id


@fault("the residual is not clamped at 0", "_src.verify.rules:residual", BACKENDS)
def _(right, weight, p, q):
    return weight * p - q


@fault("the residual is the target", "_src.verify.rules:residual", BACKENDS)
def _(right, weight, p, q):
    return weight * p + 0 * q


@fault(
    "the block rule does not multiply ratios",
    "_src.verify.rules:joint_weight",
    BACKENDS,
)
def _(right, weight, p, q):
    return right(jnp.ones_like(weight), p, q)


@fault("a block passes by its weight alone", "_src.verify.rules:passes", BACKENDS)
def _(right, u, weight, mass):
    return u < weight


@fault("synthetic rates are halved", "_src.verify.rules:accepts_synthetic", BACKENDS)
def _(right, u, conditional_rate):
    return u < conditional_rate / 2


@fault(
    "a drafter shares the target's noise under every rule",
    "_src.base.noise:uniforms",
    "drafting/test_sample.py",
)
def _(right, key, position, stream, offset):
    if stream != Stream.DRAFT:
        return right(key, position, stream, offset)
    return right(key, position + offset, Stream.RECOVER, 0)


@fault(
    "agreement: noise belongs to the step, not to the token",
    "_src.verify.reader:drawn",
    f"{BACKENDS} serving/test_agreement.py",
)
def _(right, rows, requests, positions, race):
    of_step = positions._replace(offset=0 * positions.offset)
    return right(rows, requests, of_step, race)._replace(offset=positions.offset)


# Rows and draws


@fault(
    "greedy ties go to the highest id",
    "_src.verify.backends.in_order:InOrder.max_and_place",
    BACKENDS,
)
def _(right, self, x):
    peak, place = right(self, x[:, ::-1])
    return peak, x.shape[1] - 1 - place


@fault(
    "the last part wins a greedy tie",
    "_src.verify.statistics:argmax_of_parts",
    "verify/test_backends.py verify/test_sharded.py",
)
def _(right, maxima, argmaxes):
    return jnp.max(jnp.where(maxima == jnp.max(maxima, axis=0), argmaxes, -1), axis=0)


@fault(
    "a slice past the end of its row begins too early",
    "_src.rows.rows:VocabRows.slices",
    "verify/test_backends.py verify/test_sharded.py",
)
def _(right, self, rows, first, length, end):
    return right(self, rows, first, length, 0)


@fault("probabilities are not normalized", "_src.rows.tiles:Scale.probs", BACKENDS)
def _(right, self, logits, inv_temperature):
    return jnp.exp((logits - self.shift) * inv_temperature)


@fault("the temperature is not applied", "_src.rows.tiles:Scale.probs", BACKENDS)
def _(right, self, logits, inv_temperature):
    return right(self, logits, jnp.ones_like(inv_temperature))


@fault(
    "the last tokens of a tile are never drawn",
    "_src.rows.device:Device.pick",
    BACKENDS,
)
def _(right, self, weights, u):
    return right(self, weights, 0.9 * u)


@fault("a token of weight zero is drawn", "_src.rows.device:Device.pick", BACKENDS)
def _(right, self, weights, u):
    place, total = right(self, weights, u)
    return jnp.minimum(place + 1, weights.shape[2] - 1), total


@fault("a request's rows begin one too early", "_src.base.ragged:unpack", BACKENDS)
def _(right, *args):
    layout = right(*args)
    return layout._replace(first_row=jnp.maximum(layout.first_row - 1, 0))


@fault("filters keep everything", "_src.rows.threshold:find_thresholds", BACKENDS)
def _(right, filter, *args, **named):
    return jnp.minimum(right(filter, *args, **named), -jnp.inf)


@fault(
    "one large normalizer makes all drafts of its request one-hot",
    "_src.verify.requests:usable_normalizers",
    BACKENDS,
)
def _(right, distribution, rows):
    usable = right(distribution, rows)
    return usable if usable is None else usable & jnp.all(usable, axis=-1, keepdims=True)


@fault(
    "requests that vary over an axis of shard_map are traced with it",
    "_src.verify.sharding:without_vma",
    "integrations/test_explicit_sharding.py",
)
def _(right, function, arrays, vocab_axis):
    return function(arrays)


@fault(
    "a trainer's threshold is the least logit that was kept",
    "_src.logits.logprobs:_between",
    "verify/test_logprobs.py",
)
def _(right, rows, those, kept):
    return kept


# The kernel


@fault(
    "kernel: the residual is the target",
    "_src.verify.mosaic_gpu.statistics:excess",
    "verify/test_backends.py verify/test_mosaic_gpu.py",
)
def _(right, p, drafts, exponent):
    return [x + 0 * d for x, d in zip(p, drafts, strict=True)]


@fault(
    "kernel: the last ids of a tile are never drawn",
    "_src.verify.mosaic_gpu.draw:pick_of",
    "verify/test_backends.py verify/test_mosaic_gpu.py",
)
def _(right, weights, aim):
    return right(weights, 0.5 * aim)


# Noise


@fault("accepting and recovering share a stream", "_src.base.noise:counter_of", "test_keys.py")
def _(right, stream, offset):
    return right(stream * 0, offset)


@fault("keys of four words lose two", "_src.base.noise:key_words", "test_keys.py")
def _(right, keys):
    words = jax.random.key_data(keys)
    return words[..., :2] if words.shape[-1] == 4 else right(keys)


@fault(
    "all slots of a step have one key",
    "adapters.keys:step_keys",
    "integrations/test_step_keys.py",
)
def _(right, key, slots):
    return right(key, slots * 0)


@fault(
    "parts of a shard_map share their noise",
    "adapters.common:axes_of_requests",
    "integrations/test_in_engines.py",
)
def _(right, lengths, sharding):
    return frozenset()


@fault(
    "greedy requests do not look at bad rows",
    "_src.verify.backends.in_order:InOrder.read_argmax",
    "verify/test_greedy.py",
)
def _(right, self, rows, requests, positions):
    found = right(self, rows, requests, positions)
    return found._replace(status=0 * found.status)


@fault(
    "a CPU reads all rows of a part at once",
    "_src.rows.device:Cpu.each_row",
    "verify/test_backends.py verify/test_sharded.py",
)
def _(right, self, function, count, *arrays):
    return function(None, *arrays)


@fault(
    "the loop draws the same bits at every step",
    "_src.base.noise:threefry_bits",
    "serving/test_lossless.py serving/test_loop.py",
)
def _(right, key, position, place):
    return right(key, position * 0, place)


# Drafting


@fault(
    "a stored row of another position is used",
    "_src.drafts.store:DraftStore.attach_rows",
    "drafting/test_store.py",
)
def _(right, self, drafts, positions, *others):
    drawn_at = jnp.where(self.positions >= 0, positions[0], self.positions)
    return right(dataclasses.replace(self, positions=drawn_at), drafts, positions, *others)


@fault(
    "a lookup proposes what is not written yet",
    "lm.drafting.ngram:NGramDrafter._lookup",
    "drafting/test_ngram.py",
)
def _(right, self, tokens, length, k):
    return right(self, tokens, length + 1, k)


@fault(
    "a history has no seam after a text",
    "lm.drafting.suffix:_added",
    "drafting/test_suffix.py",
)
def _(right, history, token_ids):
    new = right(history, token_ids)
    return new | {"next": (new["next"] - 1) % history["token_ids"].shape[0]}


@fault(
    "lookup takes the shortest of equal scores",
    "lm.drafting.suffix:_lengths",
    "drafting/test_suffix.py",
)
def _(right, drafter):
    m, limits = right(drafter)
    return m[::-1], limits[::-1]


@fault(
    "all levels of an EAGLE-3 tree turn as the first",
    "lm.models.eagle3:Eagle3Head.apply",
    "drafting/test_tree_eagle3.py",
)
def _(right, self, params, states, rows, *args):
    if rows.tree is not None:
        rows = rows._replace(tree=rows.tree._replace(depth=0 * rows.tree.depth))
    return right(self, params, states, rows, *args)


@fault(
    "a request that reads its prompt is thought to have begun",
    "lm.drafting.drafter:DraftContext.runs",
    "serving/test_combined.py",
)
def _(right, self):
    return jnp.ones(self.lengths.shape, bool)


@fault(
    "a prompt that is being read is read again by a step for others",
    "lm.drafting.drafter:DraftContext.runs",
    "serving/test_drafters.py",
)
def _(right, self):
    return jnp.ones(self.lengths.shape, bool)


@fault(
    "drafts are drawn from the rows of other requests",
    "lm.drafting.draw:Draws.row",
    "serving/test_drafters.py",
)
def _(right, self, logits, offset):
    return right(self, jnp.roll(logits, 1, axis=0), offset)


@fault(
    "drafts are drawn by the noise of the first slot",
    "lm.drafting.draw:_draw",
    "serving/test_drafters.py",
)
def _(right, logits, ids, context, *args):
    first = jnp.zeros(context.lengths.shape, jnp.int32)
    return right(logits, ids, dataclasses.replace(context, keys=context.keys[first]), *args)


@fault(
    "ids of a drafter are one column late",
    "lm.drafting.draw:ids_of",
    "drafting/test_draft_model.py drafting/test_eagle3.py drafting/test_lists.py",
)
def _(right, ids, vocab_size):
    return right(None if ids is None else jnp.roll(ids, 1, axis=-1), vocab_size)


@fault(
    "drafts by lookup are verified with the rows of the head",
    "lm.drafting.combined:FirstOf.propose",
    "serving/test_combined.py",
)
def _(right, self, params, context, cache, store):
    proposal, new = right(self, params, context, cache, store)
    by_head, _ = self.head.propose(params[1], context, cache[0], store)
    return proposal._replace(store=by_head.store), new


@fault(
    "a head learns of more drafts than it had",
    "lm.drafting.combined:_Memory.after",
    "serving/test_combined.py",
)
def _(right, self, context):
    return right(self._replace(num_drafts=9 * self.num_drafts), context)


@fault(
    "a prediction is taken although the text matches longer",
    "lm.drafting.prediction:Predicted.is_as_long",
    "drafting/test_prediction.py",
)
def _(right, self, num_matching):
    return self.num_matching > 0


@fault(
    "a prediction stands one token behind the prompt's end",
    "lm.decoding.batch:Batch.context",
    "drafting/test_prediction.py",
)
def _(right, self, config):
    context = right(self, config)
    return dataclasses.replace(context, prompt_lengths=context.prompt_lengths + 1)


@fault(
    "a drafter forgets its drafts where bad words and penalties count them",
    "lm.drafting.drafter:DraftContext.append",
    "serving/test_options.py",
)
def _(right, self, token_ids):
    return dataclasses.replace(right(self, token_ids), processors=self.processors)


@fault(
    "the mask of allowed ids is left out",
    "_src.logits.processors:AllowedTokens.apply",
    "serving/test_options.py",
)
def _(right, self, logits, rows, platform):
    return logits


@fault(
    "a head reads one token fewer of the text",
    "lm.drafting.eagle3:Eagle3Drafter.propose",
    "drafting/test_eagle3.py",
)
def _(right, self, params, context, cache, store):
    context = dataclasses.replace(context, lengths=context.lengths - 1)
    return right(self, params, context, cache, store)


@fault(
    "an assistant reads the key of a rejected draft",
    "lm.models.gemma_assistant:GemmaAssistantHead.apply",
    "drafting/test_gemma_assistant.py",
)
def _(right, self, params, states, rows, cache):
    rows = rows._replace(start=rows.start + 1)
    return right(self, params, states, rows, cache, -1)


@fault(
    "nodes of an assistant's tree go on from the state of another",
    "lm.models.gemma_assistant:GemmaAssistantHead.apply",
    "drafting/test_gemma_assistant.py",
)
def _(right, self, params, states, *args):
    return right(self, params, states[:, ::-1], *args)


@fault(
    "an assistant begins with the last row of a pass",
    "lm.drafting.gemma_assistant:GemmaAssistantDrafter.propose",
    "drafting/test_gemma_assistant.py",
)
def _(right, self, params, context, cache, store):
    count = jnp.where(context.num_features > 0, context.features.shape[1], 0)
    context = dataclasses.replace(context, num_features=count)
    return right(self, params, context, cache, store)


@fault(
    "layers without keys have those of the first layer of their kind",
    "lm.formats.families:gemma4_layers",
    "formats/test_gemma4.py",
)
def _(right, raw, keys_of=None):
    first: dict[Any, int] = {}
    layers = right(raw, keys_of)
    for index, spec in enumerate(layers):
        first.setdefault(spec.window, index)
    shares = [spec.keys_of is not None and keys_of is None for spec in layers]
    return [
        dataclasses.replace(spec, keys_of=first[spec.window]) if shared else spec
        for spec, shared in zip(layers, shares, strict=True)
    ]


@fault(
    "the first row of a block is the mask",
    "lm.models.block:BlockHead.apply",
    "drafting/test_block.py",
)
def _(right, self, params, rows, *args):
    masks = jnp.full_like(rows.token_ids, self.config.mask_token_id)
    return right(self, params, rows._replace(token_ids=masks), *args)


@fault(
    "a block is cut to the drafts that are wanted",
    "lm.models.block:BlockHead.apply",
    "drafting/test_block.py",
)
def _(right, self, params, rows, cache, num_drafts=None):
    size = self.config.block_size - self.config.max_drafts + (num_drafts or self.config.max_drafts)
    config = dataclasses.replace(self.config, block_size=size)
    return right(dataclasses.replace(self, config=config), params, rows, cache)


@fault("a block is one position late", "lm.models.block:BlockHead.apply", "drafting/test_block.py")
def _(right, self, params, rows, *args):
    return right(self, params, rows._replace(start=rows.start + 1), *args)


@fault(
    "a path of a tree is not kept",
    "_src.attention.cache:move_rows",
    "models/test_models.py models/test_tree_pass.py",
)
def _(right, cache, start, path):
    return cache


@fault(
    "a row without a page is written to the last one",
    "_src.attention.cache:_places",
    "attention/test_cache.py",
)
def _(right, keys, position, pages):
    blocks, rows = right(keys, position, pages)
    return jnp.minimum(blocks, keys.shape[0] - 1), rows


@fault(
    "a node of a tree turns by its place in the cache",
    "lm.models.llama:Llama.apply_with",
    "models/test_models.py models/test_tree_pass.py",
)
def _(right, self, params, groups, *given):
    def turned(rows):
        if rows.tree is None:
            return rows
        place = jnp.arange(rows.token_ids.shape[1], dtype=jnp.int32)
        depth = jnp.broadcast_to(place, rows.token_ids.shape)
        return rows._replace(tree=rows.tree._replace(depth=depth))

    return right(self, params, [turned(rows) for rows in groups], *given)


@fault(
    "bits beyond the new rows are ignored",
    "_src.attention.xla:_seen",
    "attention/test_attention.py",
)
def _(right, arrays, room, static):
    return right(arrays, room, static._replace(num_visible=arrays.query.shape[1]))


@fault(
    "a split ends where a length says",
    "_src.attention.mosaic_gpu:BlockWork.of",
    "attention/test_attention.py",
)
def _(right, shape, operands):
    block = right.__func__(BlockWork, shape, operands)  # a method of the class
    # Of two splits the second begins a tile earlier for requests of odd lengths.
    moved = (block.start % 2) * (block.split > 0) * (block.tile > 0)
    return block._replace(tile=block.tile - moved, num_tiles=block.num_tiles + moved)


@fault(
    "a tile that all rows see is rounded otherwise",
    "_src.attention.mosaic_gpu:_add_product",
    "attention/test_attention.py",
)
def _(right, found, weights, *given):
    found = right(found, weights, *given)
    rounded = found.astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.where((weights > 0).all(), rounded, found)


@fault("a window of a block is ignored", "lm.models.cache:Pass.attend", "models/test_block.py")
def _(right, step, spec, *args):
    return right(step, dataclasses.replace(spec, window=None), *args)


@fault("a window begins one position late", "lm.models.cache:Pass.attend", "models/test_block.py")
def _(right, step, spec, *args):
    late = spec if spec.window is None else dataclasses.replace(spec, window=spec.window - 1)
    return right(step, late, *args)


@fault(
    "a Markov bias is that of token 0 for all drafts",
    "lm.models.block:BlockHead.bias",
    "drafting/test_block.py",
)
def _(right, self, params, token_ids, columns=None):
    return right(self, params, jnp.zeros_like(token_ids), columns)


@fault(
    "layers that are counted after a layer are read before it",
    "lm.formats.head_layouts:_layer_ids",
    "formats/test_block_files.py",
)
def _(right, place, key, shift, num_layers):
    return tuple(layer - shift for layer in right(place, key, shift, num_layers))


@fault(
    "no layout's heads draft from the first row where files do not say it",
    "lm.formats.head_layouts:_block_layout",
    "formats/test_block_files.py",
)
def _(right, raw):
    return dataclasses.replace(right(raw), sample_from_anchor=False)


# Serving


@fault(
    "a stop token ends the text before itself",
    "_src.stats.emitted:truncate",
    "serving/test_greedy.py",
)
def _(right, *args, **named):
    num_kept, is_stopped = right(*args, **named)
    return num_kept - is_stopped, is_stopped


@fault(
    "the first chunk of a prompt finds the cache of the request before",
    "lm.models.protocol:run_in_slots",
    "serving/test_engine.py drafting/test_eagle3.py",
)
def _(right, owner, axis, cache, rows, *rest):
    return right(owner, axis, cache, rows._replace(start=rows.start + 1), *rest)


@fault(
    "the token after a chunk is not known",
    "lm.decoding.engine:NewRequests._or_zeros",
    "serving/test_prompts.py",
)
def _(right, self, values):
    return right(self, None if values is self.next_token_ids else values)


@fault(
    "a chunk ends beyond the longest prompt",
    "lm.decoding.schedule:ChunkedPrefill.next_chunk",
    "serving/test_schedule.py",
)
def _(right, self, *args, **named):
    return right(self, *args, **named)._replace(start=(self.num_read,))


@fault(
    "exact passes on a CPU have K + 1 rows",
    "lm.decoding.core:Decoder.num_rows",
    "serving/test_exact.py",
)
def _(right, self, platform):
    return self.num_drafts + 1


@fault(
    "exact takes every model",
    "lm.decoding.exact:check_rows",
    "serving/test_exact.py",
)
def _(right, *args):
    return None


@fault(
    "exact samples by every rule",
    "lm.decoding.exact:check_free_text",
    "serving/test_exact.py",
)
def _(right, *args):
    return None


@fault(
    "bits are added before they are mixed",
    "_src.testing.row_dependence:_mixed",
    "test_row_dependence.py",
)
def _(right, x):
    return x


@fault(
    "a request begins with one row too many",
    "lm.decoding.schedule:_longest_prefix",
    "serving/test_prefixes.py",
)
def _(right, engine, request, rows):
    slot, start = right(engine, request, rows)
    return slot, start + (32 <= start < request.length - 2)


@fault(
    "salts are not looked at",
    "lm.decoding.schedule:_longest_prefix",
    "serving/test_prefixes.py",
)
def _(right, engine, request, rows):
    salt = request.options.cache_salt
    return right(engine, request, {i: one._replace(salt=salt) for i, one in rows.items()})


@fault(
    "what old weights have said is generated again under new ones",
    "lm.decoding.bookkeeping:ServedRequest.under_new_weights",
    "serving/test_weights.py",
)
def _(right, self):
    return self


@fault(
    "weights are changed while steps ahead are not read",
    "lm.decoding.driver:EngineDriver._read_step",
    "serving/test_weights.py",
)
def _(right, self):
    if "set_params" in [frame.function for frame in inspect.stack()]:
        self._device.ahead.clear()
    else:
        right(self)


@fault(
    "rates count drafts after the first rejection",
    "_src.drafts.rates:DraftRates.update",
    "drafting/test_rates.py",
)
def _(right, self, num_drafts, num_accepted, path=None):
    wrong = right(self, num_drafts, num_drafts, path).tried
    return dataclasses.replace(right(self, num_drafts, num_accepted, path), tried=wrong)


@fault(
    "acceptance of old weights counts for new ones",
    "lm.decoding.bookkeeping:HostState.with_weights",
    "serving/test_weights.py",
)
def _(right, self, weights, counters, draft_rates):
    return right(self, weights, self.counters, draft_rates)


@fault(
    "an array that the drafter shares is deleted",
    "lm.decoding.weights:replaced",
    "serving/test_weights.py",
)
def _(right, held, given, delete):
    if delete:
        jax.tree.map(lambda x: x.delete(), held)
    return right(held, given, delete)


@fault(
    "caches are compared for lengths that models in 16 bits round up to one",
    "lm.decoding.inputs:check_keeps_rows",
    "serving/test_prefixes.py",
)
def _(right, model, drafter, length, **named):
    short, long = (jax.eval_shape(lambda n=n: model.init_cache(1, n)) for n in (8, 16))
    pairs = zip(jax.tree.leaves_with_path(short), jax.tree.leaves(long), strict=True)
    for (path, one), other in pairs:
        if one.shape == other.shape and not model.serves.is_index(path):
            name = f"{type(model).__name__}.init_cache(...){jax.tree_util.keystr(path)}"
            raise ValueError(f"model must have a cache whose arrays grow with it, but {name!r}")
    right(model, drafter, length, **named)


@fault(
    "rows are begun with that the device has lost",
    "lm.decoding.bookkeeping:HostState.without_kept",
    "serving/test_prefixes.py",
)
def _(right, self):
    return self


@fault(
    "what a drafter learned of one request is left to the next",
    "lm.drafting.combined:FirstOf.prefill",
    "serving/test_prefixes.py",
)
def _(right, self, params, rows, cache, *features):
    return right(self, params, rows, cache, *features)[0], cache[1]


@fault(
    "a slot is one token short between two chunks",
    "lm.decoding.engine:Engine.admit",
    "drafting/test_eagle3.py",
)
def _(right, self, params, draft_params, state, requests):
    state = right(self, params, draft_params, state, requests)
    lengths = jnp.maximum(state.batch.lengths - state.batch.done, 1)
    return dataclasses.replace(state, batch=dataclasses.replace(state.batch, lengths=lengths))


@fault(
    "a chunk before the last has features of a token that was not read",
    "lm.decoding.engine:features_before_last",
    "drafting/test_eagle3.py",
)
def _(right, features, lengths, start):
    one, count = right(features, lengths, start)
    return one, count if count is None else count | 1


@fault(
    "the rates of trees learn from the chains of a grammar",
    "lm.decoding.state:Drafted.are_chains",
    "serving/test_tree.py",
)
def _(right, self):
    return right(self) & False


@fault(
    "a step reads a prompt into the next request's slot",
    "lm.decoding.core:apply_groups",
    "serving/test_prompts.py",
)
def _(right, model, params, groups, *rest):
    if len(groups) == 2:
        drafts, prompts = groups
        wrong = prompts._replace(slots=(prompts.slots + 1) % drafts.start.shape[0])
        groups = [drafts, wrong]
    return right(model, params, groups, *rest)


@fault(
    "drafts of a request that reads its prompt are written over the prompt",
    "_src.attention.cache:write_rows",
    "models/test_models.py models/test_prompt_rows.py",
)
def _(right, layer, key, value, places, requests=None):
    if requests is not None:  # places past the end, which are not written, become the first
        places = jnp.where(places >= layer[0].shape[-1], 0, places)
    return right(layer, key, value, places, requests)


@fault(
    "who needs programs that are compiled behind does not wait for them",
    "lm.decoding.warm_up:needs",
    "serving/test_grammar_driver.py",
)
def _(right, engine, request):
    return set()


@fault(
    "a product of one row converts its weight",
    "lm.models.int8:matmul",
    "models/test_llama.py",
)
def _(right, x, weight, *, outputs_first=False):
    return jnp.einsum("oi,...i->...o", weight, x) if outputs_first else x @ weight


@fault(
    "rows of some slots are put where the first slots are",
    "lm.decoding.core:put_slots",
    "serving/test_drafters.py",
)
def _(right, arrays, some, slots):
    return right(arrays, some, None if slots is None else jnp.arange(len(slots)))


@fault(
    "rows of some slots read the cache of the first slots",
    "_src.attention.xla:of_slots",
    "attention/test_attention.py",
)
def _(right, cache, slots, num_kv, room):
    return right(cache, jnp.arange(len(slots), dtype=jnp.int32), num_kv, room)


@fault(
    "what some slots draft from is stored as what others do",
    "_src.drafts.store:DraftStore.put",
    "drafting/test_store.py",
)
def _(right, self, some, slots):
    return right(self, some, slots[::-1])


@fault(
    "a step has rows for fewer slots than run",
    "lm.decoding.schedule:narrow_slots",
    "serving/test_schedule.py",
)
def _(right, num_slots, widths, running):
    found = right(num_slots, widths, running)
    return found if found is None else found[: max(1, len(found) - 1)]


@fault(
    "a slot keeps the cache of the request before",
    "lm.models.protocol:put_cache",
    "serving/test_engine.py",
)
def _(right, cache, some, slots, axis):
    return cache


@fault(
    "a draft does not count as output for the minimum length",
    "_src.logits.processors:MinTokens.append",
    "serving/test_options.py",
)
def _(right, self, token_ids):
    return self


@fault(
    "a draft is not counted by penalties",
    "_src.logits.processors:Penalties.append",
    "serving/test_options.py",
)
def _(right, self, token_ids):
    return self


@fault(
    "a grammar that begins in mid-draft begins a token late",
    "_src.logits.matchers:DelayedMatcher.has_begun",
    "serving/test_grammar.py",
)
def _(right, self):
    return self._before[-len(self._begin) - 1 : -1] == self._begin


@fault(
    "matchers stay where a step's drafts led them",
    "_src.logits.grammar:GrammarLookahead.close",
    "serving/test_grammar.py",
)
def _(right, self):
    return None


@fault(
    "an int8 matrix is taken without its scales",
    "lm.models.int8_matmul:int8_matmul",
    "models/test_int8.py",
)
def _(right, x, values, scale):
    return right(x, values, jnp.ones_like(scale))


@fault("a weight that is NaN becomes 0", "lm.models.int8:quantized", "models/test_int8.py")
def _(right, weight):
    return right(jnp.nan_to_num(weight))


@fault(
    "keys that no row sees reach derivatives",
    "_src.attention.xla:_attend_apart",
    "attention/test_attention.py",
)
def _(right, static, arrays):
    return attention_xla._attend.fun(static, arrays)


@fault(
    "of a long cache attention reads a position too little",
    "_src.attention.xla:attend",
    "attention/test_attention.py",
)
def _(right, arrays, static):
    if arrays.max_seen is not None:
        arrays = arrays._replace(max_seen=arrays.max_seen - 1)
    return right(arrays, static)


@fault(
    "how far attention reads follows the longest text without a draft budget, too",
    "lm.decoding.core:Decoder.allowed_rows",
    "serving/test_draft_budget.py",
)
def _(right, self, rows):
    return rows


@fault(
    "a free slot with a long text has attention read as far",
    "lm.decoding.core:Decoder.score",
    "serving/test_draft_budget.py",
)
def _(right, self, params, state, prompts=()):
    awake = dataclasses.replace(state.batch, done=jnp.zeros_like(state.batch.done))
    return right(self, params, dataclasses.replace(state, batch=awake), prompts)


@fault("int8 weights are cut, not rounded", "lm.models.int8:quantized", "models/test_int8.py")
def _(right, weight):
    found = right(weight)
    cut = jnp.trunc(weight / found.scale[:, None]).astype(jnp.int8)
    return dataclasses.replace(found, values=cut)


@fault(
    "a slot keeps its length when another is copied to it",
    "lm.decoding.programs:copy",
    "serving/test_prefixes.py",
)
def _(right, engine, state, slots):
    lengths = jnp.array(state.batch.lengths)  # the state is donated
    state = right(engine, state, slots)
    return dataclasses.replace(state, batch=dataclasses.replace(state.batch, lengths=lengths))


@fault(
    "a slot keeps its features when another is copied to it",
    "lm.decoding.programs:copy",
    "serving/test_prefixes.py",
)
def _(right, engine, state, slots):
    lengths = jnp.array(state.features.lengths)  # the state is donated
    state = right(engine, state, slots)
    return dataclasses.replace(state, features=state.features._replace(lengths=lengths))


@fault(
    "of several slots the first alone is copied",
    "lm.decoding.device:DeviceState._copied",
    "serving/test_prefixes.py",
)
def _(right, self, copies, requests):
    return right(self, [*copies][:1], requests)


@fault(
    "slots are copied in the reverse order",
    "lm.decoding.device:DeviceState._copied",
    "serving/test_prefixes.py",
)
def _(right, self, copies, requests):
    return right(self, [*copies][::-1], requests)


@fault(
    "the slot that was used last is given away first",
    "lm.decoding.bookkeeping:HostState._kept_after",
    "serving/test_prefixes.py",
)
def _(right, self, left):
    kept = right(self, left)
    return {slot: kept[slot] for slot in sorted(kept, key=lambda slot: slot not in left)}


@fault(
    "every update says what was reused",
    "lm.decoding.bookkeeping:ServedRequest.after",
    "serving/test_prefixes.py",
)
def _(right, self, *given):
    after, update = right(self, *given)
    return after, update and dataclasses.replace(update, num_reused=self.num_reused)


@fault(
    "what a preempted request has read itself is reused",
    "lm.decoding.schedule:_next_group",
    "serving/test_schedule.py",
)
def _(right, *given):
    group, places = right(*given)
    pairs = zip(group, places, strict=True)
    return [one._replace(num_reused=place.start) for one, place in pairs], places


@fault(
    "what is generated again is counted again",
    "lm.decoding.core:Decoder.learned",
    "serving/test_repeats.py",
)
def _(right, self, state, *given):
    batch = dataclasses.replace(state.batch, known_lengths=None)
    new = right(self, dataclasses.replace(state, batch=batch), *given)
    return dataclasses.replace(new, batch=state.batch)


@fault(
    "drafts that are generated again are learned from",
    "lm.decoding.core:Decoder.learned",
    "serving/test_repeats.py",
)
def _(right, self, state, drafts, output, record, is_forced):
    return right(self, state, drafts, output, record, is_forced & ~state.batch.repeats)


@fault(
    "a step that generates again goes on beyond what was known",
    "lm.decoding.batch:Batch.most_new",
    "serving/test_repeats.py",
)
def _(right, self):
    return self.options.max_lengths - self.lengths


@fault(
    "what is generated again is delivered again",
    "lm.decoding.bookkeeping:HostState.after_step",
    "serving/test_repeats.py",
)
def _(right, self, *given, **named):
    slots = {slot: one._replace(replay=None) for slot, one in self.slots.items()}
    return right(self._replace(slots=slots), *given, **named)


@fault(
    "one that waits generates again what old weights have said",
    "lm.decoding.bookkeeping:HostState.with_weights",
    "serving/test_weights.py",
)
def _(right, self, *given):
    return right(self, *given)._replace(returning=self.returning)


@fault(
    "weights share the memory of the caller's",
    "lm.decoding.weights:put",
    "serving/test_weights.py",
)
def _(right, new, sharding=None):
    return jax.device_put(new, sharding)


@fault(
    "of two arrays of the same memory the old one is deleted",
    "lm.decoding.weights:_memory",
    "serving/test_weights.py",
)
def _(right, array):
    return {id(array)}


@fault(
    "deleted arrays are found when they are used",
    "lm.decoding.weights:check_are_there",
    "serving/test_weights.py",
)
def _(right, name, given):
    return None


@fault(
    "a draft model reads as many tokens as its step has drafts",
    "lm.drafting.drafter:DraftContext.num_unread",
    "serving/test_draft_budget.py",
)
def _(right, self):
    return self.config.num_speculative_tokens + 1


@fault(
    "pieces that a draft model with another tokenizer did not draft are not read",
    "lm.drafting.retokenized:RetokenizingDrafter._read_between",
    "drafting/test_retokenized.py",
)
def _(right, self, *given):
    is_prompt = "prefill" in [frame.function for frame in inspect.stack()]
    return right(self, *given) if is_prompt else given[-1]


@fault(
    "of a long token the first pieces are read",
    "lm.drafting.retokenized:_spelled",
    "drafting/test_retokenized.py",
)
def _(right, text, own):
    return right(text, own)[:8]


@fault(
    "columns of an int8 matrix are taken without its scales",
    "lm.models.int8:Int8Weight.columns",
    "models/test_int8.py",
)
def _(right, self, x, ids):
    return right(dataclasses.replace(self, scale=jnp.ones_like(self.scale)), x, ids)


@fault(
    "add_bos_token of a Llama tokenizer is not read",
    "lm.formats.text_keys:tokens_around",
    "formats/test_text_keys.py",
)
def _(right, directory):
    return None


@fault(
    "add_bos_token of every tokenizer is read",
    "lm.formats.text_keys:_is_of_llama",
    "formats/test_text_keys.py",
)
def _(right, directory, raw):
    return True


@fault(
    "keys that change texts are passed over",
    "lm.formats.text_keys:check_text_keys",
    "formats/test_text_keys.py",
)
def _(right, directory):
    return None


@fault(
    "add_prefix_space may say what the tokenizer does not do",
    "lm.formats.text_keys:check_prefix_space",
    "formats/test_text_keys.py",
)
def _(right, directory, has_prefix):
    return None


@fault(
    "added tokens may have ids that the library does not give them",
    "lm.text.tokenizer:_check_added_ids",
    "formats/test_added_tokens.py",
)
def _(right, path, added, library_tokenizer):
    return None


@fault(
    "lists in plain messages spell special tokens",
    "lm.text.marks:Marks.put_into",
    "text/test_chat.py",
)
def _(right, self, value, name):
    return value if isinstance(value, list) else right(self, value, name)


@fault(
    "parts of plain messages spell special tokens together",
    "lm.text.tokenizer:Tokenizer._begins_special_token",
    "text/test_chat.py",
)
def _(right, self, text):
    return False


# Layers


@fault(
    "windows of a tree count back from its first node",
    "lm.models.cache:_seen",
    "models/test_models.py models/test_tree_pass.py",
)
def _(right, rows, window):
    return rows.tree_mask, None


@fault(
    "a window is not looked at",
    "lm.models.cache:Pass.attend",
    "models/test_llama.py",
)
def _(right, step, spec, *args):
    return right(step, dataclasses.replace(spec, window=None), *args)


@fault(
    "every layer divides by the root of its head's width",
    "lm.models.cache:Pass.attend",
    "models/test_llama.py",
)
def _(right, step, spec, *args):
    return right(step, dataclasses.replace(spec, scale=None), *args)


@fault(
    "1 is not added to the weight of a norm",
    "lm.models.layers:rms_norm",
    "formats/test_huggingface.py",
)
def _(right, x, weight, norm):
    return right(x, weight, dataclasses.replace(norm, adds_one=False))


@fault(
    "all layers turn as the last one",
    "lm.models.layers:rotations",
    "formats/test_huggingface.py",
)
def _(right, layers, positions):
    return right(layers[-1:] * len(layers), positions)


@fault(
    "heads of all layers are split as the first one's",
    "lm.models.tensor_parallel:TensorParallelLlama._spec",
    "models/test_models.py models/test_tensor_parallel.py",
)
def _(right, model, path):
    return model.model.config.layers[0]


@fault(
    "every device adds the bias after attention",
    "lm.models.tensor_parallel:TensorParallelLlama._part",
    "models/test_models.py",
)
def _(right, model, path, x, device):
    return x if path[-1].key == "o_bias" else right(model, path, x, device)


def found_for(name: str) -> tuple[Any, str, Any]:
    """What a fault replaces: the module or class that holds it, its name there, and itself."""
    module_name, path = FAULTS[name].function.split(":")
    module = importlib.import_module(f"jax_specdec.{module_name}")
    *classes, attribute = path.split(".")
    owner = functools.reduce(getattr, classes, module)
    return owner, attribute, inspect.getattr_static(owner, attribute)


def plant(name: str) -> None:
    """Replaces the function of a fault wherever the package holds it."""
    chosen = FAULTS[name]
    owner, attribute, found = found_for(name)
    right = found.fget if isinstance(found, property) else found

    @functools.wraps(right)
    def wrong(*args: Any, **named: Any) -> Any:
        return chosen.wrong(right, *args, **named)

    if inspect.isclass(owner):
        setattr(owner, attribute, property(wrong) if isinstance(found, property) else wrong)
        return
    holders = [held for key, held in sys.modules.items() if key.startswith("jax_specdec")]
    for holder in holders:
        for key, value in list(vars(holder).items()):
            if value is right:
                setattr(holder, key, wrong)


def pytest_sessionstart() -> None:
    """This file is a plugin of the process that runs the tests."""
    importlib.import_module("jax_specdec.lm")
    plant(os.environ[PLANTED])


def caught_by(name: str) -> str | None:
    """The first test that fails with the fault; None where none does."""
    files = [f"tests/{file}" for file in FAULTS[name].tests.split()]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "plant_faults"]
    options += ["-m", "not slow and not gpu and not aot"]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        capture_output=True,
        text=True,
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths), PLANTED: name},
    )
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    assert found or result.returncode == 0, result.stdout + result.stderr
    return found and found[1]


def main(names: Sequence[str]) -> int:
    missed = 0
    for name in names or FAULTS:
        test = caught_by(name)
        missed += test is None
        print(f"| {name} | {f'`{test}`' if test else 'nothing'} |", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
