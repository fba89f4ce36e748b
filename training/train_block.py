"""Trains block heads, DFlash and DSpark, for the embedded target, or for another; see README.md.

    python training/train_block.py --out build/block --seconds 500
    python training/train_block.py --out build/head --target DIR --windows FILES

The second form learns from what `own_text.py` wrote; `--text` takes files in its place.

A head learns from the target's own distribution p, over text and over what the target continues
text with. In each window many anchors are drawn; the block of each reads the features before its
anchor and itself, as in drafting. Draft j of an anchor at position n is judged by p of n + 1 + j.

On a GPU the compute dtype is bfloat16, on a CPU float32; master weights are float32.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import stdlib_text
from own_text import Own
from train_eagle3 import (
    CHUNK,
    Lessons,
    Mixture,
    Params,
    Target,
    add_options,
    batches,
    load_target,
    read_lessons,
    run_chunks,
    target_name,
    write_record,
)
from train_embedded import (
    State,
    learning_rate,
    make_optimizer,
    updated,
)

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.models.layers import Attend, random_weights

LAYER = lm.models.LayerSpec(
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=192, qk_norm=True
)
LAYERS = lm.models.DecoderConfig(
    vocab_size=256, hidden_size=256, layers=(LAYER,) * 2, tie_word_embeddings=True
)
AUX_LAYERS = (2, 4, 6)
MASK = 255  # a byte that no text has
MARKOV_RANK = 64
CE_WEIGHT, TV_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
DECAY = 4.0  # draft j has the weight exp(-j / DECAY)
LOWEST_TEMPERATURE = 0.1  # of the windows that the target continues; 1 is the highest
WARMUP_STEPS = 100
SAMPLING_SHARE = 0.2  # of the seconds, at most
EVALUATION_SECONDS = 50  # for each head, kept back
TEMPERATURES = (0.0, 0.8)


def make_head(
    kind: str,
    block_size: int,
    dtype: Any = jnp.float32,
    decoder: lm.models.DecoderConfig = LAYERS,
    aux_hidden_state_layers: tuple[int, ...] = AUX_LAYERS,
    mask: int = MASK,
    markov_rank: int = MARKOV_RANK,
) -> lm.BlockHead:
    """A head with a block of `block_size` rows, by default for the embedded target.

    A "dflash" head predicts in row j the token at its own position; "dspark" predicts the next one,
    with the bias of a Markov head and a confidence.
    """
    is_dspark = kind == "dspark"
    config = lm.BlockHeadConfig.of_target(
        decoder,
        layers=decoder.layers,
        aux_hidden_state_layers=aux_hidden_state_layers,
        block_size=block_size,
        mask_token_id=mask,
        sample_from_anchor=is_dspark,
        markov_rank=markov_rank if is_dspark else None,
        enable_confidence_head=is_dspark,
        confidence_head_with_markov=is_dspark,
    )
    return lm.BlockHead(config, dtype)


def head_for(kind: str, target: Target, args: argparse.Namespace) -> lm.BlockHead:
    """A head for the target that the options name."""
    if args.target is None:
        return make_head(kind, args.block_size, target.model.dtype, markov_rank=args.markov_rank)
    c = target.model.config
    layer = dataclasses.replace(
        c.layers[0],
        intermediate_size=args.intermediate_size or c.layers[0].intermediate_size,
        qkv_bias=False,
        qk_norm=True,
    )
    decoder = dataclasses.replace(c, layers=(layer,) * args.num_layers)
    layers = tuple(args.layers or (2, len(c.layers) // 2, len(c.layers) - 3))
    # A special token that no text has, if the last one is not the end of texts.
    tokenizer = lm.load_tokenizer(args.target)
    unused = set(tokenizer.special_tokens) - {*tokenizer.stop_token_ids}
    mask = max(unused, default=c.vocab_size - 1) if args.mask_id is None else args.mask_id
    return make_head(
        kind, args.block_size, target.model.dtype, decoder, layers, mask, args.markov_rank
    )


def first_params(head: lm.BlockHead, key: jax.Array) -> Params:
    """Random weights in float32, without those that are the target's."""
    shapes = {k: v for k, v in head.weight_shapes.items() if k not in ("embed_tokens", "lm_head")}
    params = random_weights(shapes, key, jnp.float32, head.config.layers)
    if "markov_w2" in params:  # [V, r], multiplied from the right: r is what each logit sums
        size, rank = params["markov_w2"].shape
        params["markov_w2"] = params["markov_w2"] * (size / rank) ** 0.5
    return params


def block_attention(
    keys: jax.Array, values: jax.Array, anchors: jax.Array, block_size: int
) -> Attend:
    """Attention of the blocks of `anchors` `[B, A]` at `keys` and `values` `[B, M, N_kv, D]`.

    A row reads the M positions that are before its anchor, and all rows of its own block.
    """
    length = keys.shape[1]
    visible = jnp.arange(length, dtype=jnp.int32)[None, None, :] < anchors[:, :, None]
    visible = visible[:, None, None, :, None, :]  # [B, N_kv, group, A, S, M]

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        batch_size, rows, num_kv, head_dim = key.shape
        blocks = (batch_size, rows // block_size, block_size, num_kv)
        query = query.reshape(*blocks, -1, head_dim)
        key, value = key.reshape(*blocks, head_dim), value.reshape(*blocks, head_dim)
        wide = {"preferred_element_type": jnp.float32}
        far = jnp.einsum("baskgd,bjkd->bkgasj", query, keys, **wide)
        far = jnp.where(visible, far, -jnp.inf)
        near = jnp.einsum("baskgd,batkd->bkgast", query, key, **wide)
        weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1) * head_dim**-0.5, axis=-1)
        weights = weights.astype(value.dtype)
        read = jnp.einsum("bkgasj,bjkd->baskgd", weights[..., :length], values)
        read = read + jnp.einsum("bkgast,batkd->baskgd", weights[..., length:], value)
        return read.reshape(batch_size, rows, -1, head_dim)

    return attend


def run_blocks(
    head: lm.BlockHead,
    params: Params,
    embedding: jax.Array,
    features: jax.Array,
    anchor_ids: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """States `[B, A, K, H]` of the rows that draft, for blocks at the anchors `[B, A]`.

    `features` `[B, M, A * H]` are those of positions 0 to M - 1; `anchor_ids` `[B, A]` are the
    tokens at the anchors.
    """
    batch_size, length = features.shape[:2]
    size, count = head.config.block_size, head.config.max_drafts
    positions = jnp.arange(length, dtype=jnp.int32)[None, :]
    context = head.context(params, features, jnp.broadcast_to(positions, (batch_size, length)))

    def attend(index: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return block_attention(*context[index], anchors, size)(query, key, value)

    masks = jnp.full((*anchors.shape, size - 1), head.config.mask_token_id, jnp.int32)
    ids = jnp.concatenate([anchor_ids[:, :, None], masks], axis=2)  # [B, A, S]
    places = anchors[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None, :]
    # All blocks of a window are rows of one sequence: [B, A * S].
    ids, places = (x.reshape(batch_size, -1) for x in (ids, places))
    states = head.run(params, embedding[ids], places, attend)
    return states.reshape(*anchors.shape, size, -1)[:, :, size - count :]


def draft_logits(
    params: Params, output: jax.Array, states: jax.Array, previous: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits `[..., V]` of q after the tokens `previous`, and those `[...]` of the confidence.

    `output` `[V, H]` is the target's output matrix. A head without a confidence gives zeros for it.
    """
    logits = (states @ output.T).astype(jnp.float32)
    if "markov_w1" not in params:
        return logits, jnp.zeros(previous.shape)
    # As a product, the gradient of W1 is summed in float32.
    memory = jax.nn.one_hot(previous, output.shape[0], dtype=states.dtype) @ params["markov_w1"]
    logits = logits + (memory @ params["markov_w2"].T).astype(jnp.float32)
    seen = jnp.concatenate([states, memory], axis=-1).astype(jnp.float32)
    confidence = seen @ params["confidence_proj"].astype(jnp.float32)
    return logits, confidence[..., 0] + params["confidence_bias"].astype(jnp.float32)[0]


class Measures(NamedTuple):
    """Of each draft `[..., K]`; the text itself stands for the drafts before it."""

    cross_entropy: jax.Array  # of the target's distribution, nats
    acceptance: jax.Array  # alpha = sum min(p, q), at temperature 1
    agreement: jax.Array  # whether the argmaxes are the same
    confidence_loss: jax.Array  # cross entropy of alpha, nats
    confidence_error: jax.Array  # |a - alpha|


def measure(
    head: lm.BlockHead, params: Params, target: Target, tokens: jax.Array, anchors: jax.Array
) -> Measures:
    """The measures `[B, A, K]` of blocks at `anchors` `[B, A]` in [1, S - K] of tokens `[B, S]`."""
    params = jax.tree.map(lambda x: x.astype(head.dtype), params)
    logits, features = jax.lax.stop_gradient(target.run(tokens, head.aux_hidden_state_layers))
    embedding = target.params["embed_tokens"]
    output = embedding if "lm_head" not in target.params else target.params["lm_head"].T
    rows = draft_rows(head, anchors)
    batch = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None, None]
    previous = tokens[batch, rows]  # the anchor, then what the drafts before should be
    states = run_blocks(head, params, embedding, features, previous[:, :, 0], anchors)

    @jax.checkpoint  # what a vocabulary makes large is computed again, not kept
    def judge(params: Params, states: jax.Array) -> Measures:
        judged = logits[batch, rows]
        p = jax.nn.softmax(judged.astype(jnp.float32))
        drafted, confidence = draft_logits(params, output, states, previous)
        log_q = jax.nn.log_softmax(drafted)
        alpha = jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)
        label = jax.lax.stop_gradient(alpha)
        return Measures(
            cross_entropy=-jnp.sum(p * log_q, axis=-1),
            acceptance=alpha,
            agreement=jnp.argmax(drafted, axis=-1) == jnp.argmax(judged, axis=-1),
            confidence_loss=optax.sigmoid_binary_cross_entropy(confidence, label),
            confidence_error=jnp.abs(jax.nn.sigmoid(confidence) - label),
        )

    return judge(params, states)


def draft_rows(head: lm.BlockHead, anchors: jax.Array) -> jax.Array:
    """Positions `[B, A, K]` whose next tokens are drafted by blocks at `anchors` `[B, A]`."""
    offsets = jnp.arange(head.config.max_drafts, dtype=jnp.int32)
    return anchors[:, :, None] + offsets[None, None, :]


def is_wanted(head: lm.BlockHead, wanted: jax.Array, anchors: jax.Array) -> jax.Array:
    """Where drafts `[B, A, K]` count, by `wanted` `[B, S]` of the positions before theirs."""
    batch = jnp.arange(wanted.shape[0], dtype=jnp.int32)[:, None, None]
    return wanted[batch, draft_rows(head, anchors)].astype(jnp.float32)


def mean_where(values: jax.Array, counted: jax.Array) -> jax.Array:
    """The mean over windows and blocks `[K]` of values `[B, A, K]`."""
    total = jnp.sum(values.astype(jnp.float32) * counted, axis=(0, 1))
    return total / jnp.maximum(jnp.sum(counted, axis=(0, 1)), 1)


def loss_of(head: lm.BlockHead, found: Measures, counted: jax.Array) -> jax.Array:
    """The loss [], over drafts that are `counted` `[B, A, K]`.

    Cross entropy, |p - q|_1 = 2 (1 - alpha), and that of the confidence.
    """
    losses = CE_WEIGHT * found.cross_entropy + TV_WEIGHT * 2 * (1 - found.acceptance)
    if head.config.enable_confidence_head:
        losses = losses + CONFIDENCE_WEIGHT * found.confidence_loss
    losses = mean_where(losses, counted)
    weights = jnp.exp(-jnp.arange(losses.shape[0], dtype=jnp.float32) / DECAY)
    return jnp.sum(weights * losses) / jnp.sum(weights)


def draw_anchors(head: lm.BlockHead, tokens: jax.Array, count: int, key: jax.Array) -> jax.Array:
    """`count` anchors of each window, such that the target knows all that their drafts predict."""
    shape, end = (tokens.shape[0], count), tokens.shape[1] - head.config.max_drafts
    return jax.random.randint(key, shape, 1, end + 1, jnp.int32)


def make_chunk(head: lm.BlockHead, model: lm.models.Llama, args: argparse.Namespace) -> Callable:
    """CHUNK training steps in one compiled loop; returns the state and the mean loss."""
    optimizer = make_optimizer(args.weight_decay)

    @partial(jax.jit, donate_argnums=0)
    def chunk(
        state: State, target_params: Params, source: Mixture | Own, total: jax.Array
    ) -> tuple[State, jax.Array]:
        target = Target(model, target_params)

        def step(state: State, _: None) -> tuple[State, jax.Array]:
            key, draw_key, anchor_key = jax.random.split(state.key, 3)
            tokens, wanted = source.draw(draw_key, args.batch_size)
            anchors = draw_anchors(head, tokens, args.anchors, anchor_key)
            counted = is_wanted(head, wanted, anchors)

            def loss_fn(params: Params) -> jax.Array:
                return loss_of(head, measure(head, params, target, tokens, anchors), counted)

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            rate = learning_rate(args.learning_rate, state.step, total, WARMUP_STEPS)
            return updated(optimizer, state, grads, rate, key), loss

        state, losses = jax.lax.scan(step, state, length=CHUNK)
        return state, losses.mean()

    return chunk


def train(
    target: Target,
    head: lm.BlockHead,
    source: Mixture | Own,
    args: argparse.Namespace,
    seconds: float,
    save: Callable[[Params], None],
) -> tuple[Params, list[dict[str, float]]]:
    """Trains for args.steps steps, or as many as fit into `seconds`; weights and losses."""
    init_key, key = jax.random.split(jax.random.key(args.seed))
    if args.init is None:
        params = first_params(head, init_key)
    else:
        loaded = lm.load_head(args.init, lm.formats.LoadedModel(*target), lm.BlockHead).params
        own = {x: y for x, y in loaded.items() if x not in ("embed_tokens", "lm_head")}
        params = jax.tree.map(lambda x: x.astype(jnp.float32), own)
    state = State(params, make_optimizer(args.weight_decay).init(params), jnp.int32(0), key)
    chunk = make_chunk(head, target.model, args)
    state, log = run_chunks(
        lambda state, total: chunk(state, target.params, source, total),
        state,
        args,
        seconds,
        lambda state: save(state.params),
    )
    save(state.params)
    return jax.tree.map(lambda x: x.astype(head.dtype), state.params), log


def save_head(
    directory: Path, head: lm.BlockHead, target: Target, name: str, params: Params
) -> None:
    """Writes a head in the layout of speculators, in bfloat16; what is the target's is left out."""
    shared = {x: y for x, y in target.params.items() if x in ("embed_tokens", "lm_head")}
    whole = {"lm_head": target.params["embed_tokens"], **params, **shared}
    lm.formats.save_block_head(directory, head, whole, jnp.bfloat16, target_name=name)


@partial(jax.jit, static_argnums=(0, 1))
def measure_batch(
    head: lm.BlockHead,
    model: lm.models.Llama,
    params: Params,
    target_params: Params,
    tokens: jax.Array,
    wanted: jax.Array,
    anchors: jax.Array,
) -> tuple[Measures, jax.Array, jax.Array]:
    """Means of `measure` `[K]`, and 1 + the mean number of drafts accepted at T = 1 and T = 0.

    The latter over blocks all of whose drafts are wanted.
    """
    found = measure(head, params, Target(model, target_params), tokens, anchors)
    counted = is_wanted(head, wanted, anchors)
    whole = counted.min(axis=-1, keepdims=True)
    lengths = [
        1 + mean_where(jnp.cumprod(x.astype(jnp.float32), axis=-1), whole).sum()
        for x in (found.acceptance, found.agreement)
    ]
    return jax.tree.map(lambda x: mean_where(x, counted), found), *lengths


def evaluate_text(
    head: lm.BlockHead,
    params: Params,
    target: Target,
    windows: Own,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """What `measure_batch` finds in windows `[M, S]`, where the text stands for the drafts."""
    key, parts = jax.random.key(args.seed + 2), []
    for index, (tokens, wanted) in enumerate(batches(windows, args.batch_size)):
        anchors = draw_anchors(head, tokens, args.anchors, jax.random.fold_in(key, index))
        given = (params, target.params, tokens, wanted, anchors)
        parts.append(jax.device_get(measure_batch(head, target.model, *given)))
    found, length, greedy_length = jax.tree.map(lambda *x: np.mean(x, axis=0), *parts)
    rounded = {
        name: np.round(x.astype(float), 4).tolist()
        for name, x in found._asdict().items()
        if head.config.enable_confidence_head or not name.startswith("confidence")
    }
    return {**rounded, "length": round(float(length), 3), "greedy": round(float(greedy_length), 3)}


def evaluate_decoding(
    head: lm.BlockHead,
    params: Params,
    target: Target,
    prompts: list[np.ndarray],
    num_drafts: int,
    new_tokens: int,
) -> dict[str, float]:
    """Mean acceptance length by temperature: emitted tokens per target pass, over all prompts.

    The whole block is drafted, and the first `num_drafts` of it are verified. At temperature 0 a
    text also ends with the byte that ends a document.
    """
    found = {}
    whole = params | {name: target.params["embed_tokens"] for name in ("embed_tokens", "lm_head")}
    for temperature in TEMPERATURES:
        output = lm.generate(
            *target, prompts, drafter=lm.BlockDrafter(head), draft_params=whole,
            config=sd.SpecDecodeConfig(num_speculative_tokens=num_drafts),
            max_new_tokens=new_tokens, temperature=temperature, key=jax.random.key(3),
            stop_token_ids=() if temperature else (lm.DOCUMENT_SEPARATOR,),
        )  # fmt: skip
        kept = output.steps.num_kept
        found[f"{temperature:g}"] = round(float(kept.sum() / (kept > 0).sum()), 3)
    return found


def evaluate(
    head: lm.BlockHead,
    params: Params,
    target: Target,
    lessons: Lessons,
    prompts: list[np.ndarray],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """All the measurements, which are printed too."""
    results: dict[str, Any] = {}
    for name, windows in lessons.judged.items():
        results[name] = evaluate_text(head, params, target, windows, args)
        print(f"  {name:26} {json.dumps(results[name])}", flush=True)
    if prompts:
        results["mean acceptance length"] = {}
    for count in (
        sorted({min(4, head.config.max_drafts), head.config.max_drafts}) if prompts else ()
    ):
        found = evaluate_decoding(head, params, target, prompts, count, args.new_tokens)
        results["mean acceptance length"][f"K = {count}"] = found
        print(f"  acceptance length, K = {count}, by temperature {found}", flush=True)
    return results


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments, with the defaults that depend on the device filled in."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for one folder per head")
    add("--kinds", nargs="+", choices=["dflash", "dspark"], default=["dflash", "dspark"])
    add("--seconds", type=float, default=500 if on_gpu else 7200, help="for everything together")
    add("--steps", type=int, default=10**6 if on_gpu else 1000, help="at most, per head")
    add("--block-size", type=int, default=8)
    add("--num-layers", type=int, default=2, help="of the head, with --target")
    add("--markov-rank", type=int, default=MARKOV_RANK, help="of DSpark")
    add("--mask-id", type=int, help="with --target; default: its last special token")
    add("--anchors", type=int, default=64, help="per window and step")
    add("--functions", type=int, default=24, help="held-out functions that are decoded at the end")
    add("--new-tokens", type=int, default=192, help="of each of them")
    add_options(parser, batch_size=128, length=512, windows=2**15)
    parser.set_defaults(learning_rate=2e-3)
    args = parser.parse_args(arguments)
    if args.batch_size < 2 or args.length < 2 * args.block_size:
        parser.error("--batch-size must be at least 2, --length at least twice --block-size")
    return args


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    begin = time.monotonic()
    args = parse_args(arguments)
    target, prompts = load_target(args), []
    if args.target is None:
        held_out = stdlib_text.read_text(args.stdlib).held_out
        functions = stdlib_text.function_heads(held_out, args.functions)
        prompts = [lm.encode_bytes(context + text) for context, text in functions]
    limit = SAMPLING_SHARE * args.seconds
    lessons = read_lessons(target, args, LOWEST_TEMPERATURE, limit)
    print(f"{time.monotonic() - begin:6.0f} s  {lessons.name}", flush=True)

    for index, kind in enumerate(args.kinds):
        head, directory = head_for(kind, target, args), args.out / kind
        left = args.seconds - (time.monotonic() - begin)
        budget = left / (len(args.kinds) - index) - EVALUATION_SECONDS
        print(f"{kind}: {budget:.0f} s of training", flush=True)
        params, log = train(
            target, head, lessons.source, args, budget,
            partial(save_head, directory, head, target, target_name(args)),
        )  # fmt: skip
        write_record(directory, args, lessons, log=log)
        results = evaluate(head, params, target, lessons, prompts, args)
        write_record(directory, args, lessons, results=results, log=log)
        size = (directory / "model.safetensors").stat().st_size
        print(f"{time.monotonic() - begin:6.0f} s  wrote {directory}, {size} bytes", flush=True)


if __name__ == "__main__":
    main()
