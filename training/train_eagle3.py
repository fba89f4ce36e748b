"""Trains EAGLE-3 heads for the embedded target, or for another; see README.md.

    python training/train_eagle3.py --out build/eagle3
    python training/train_eagle3.py --out build/head --target DIR --text FILES --vocab-size 32000
    python training/train_eagle3.py --out build/head --target DIR --windows FILES

The third form learns from what `own_text.py` wrote.

A head learns from the target's own distribution, over text and over what the target continues text
with. It is unrolled as it drafts ("training-time test"): step s reads the true token i + 1 + s and
the head's own state of step s - 1 at i, and is judged by what the target says of token i + 2 + s.

On a GPU the compute dtype is bfloat16, on a CPU float32; master weights are float32.
"""

import argparse
import dataclasses
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import stdlib_text
from own_text import Own, beginnings, continue_windows
from train_embedded import (
    Data,
    State,
    attention_implementation,
    causal_attention,
    learning_rate,
    load_data,
    make_optimizer,
    sample_windows,
    updated,
)

from jax_specdec import lm
from jax_specdec.lm.models.heads import head_logits
from jax_specdec.lm.models.layers import rms_norm

NUM_STEPS = 4  # T, of the unrolled drafting
STEP_DECAY = 0.8  # weight of a step's loss, relative to the step before
WARMUP_STEPS = 100
FROZEN = ("embed_tokens", "lm_head", "target_ids")  # the target's own, or chosen before training
HELD_OUT_EVERY = 20  # of the documents of a user's text, one is for evaluation
SAMPLE_BATCH = {"gpu": 2048, "cpu": 64}
LISTS = ("kinds", "layers", "vocab_size")  # options that are recorded, unlike paths
CHUNK = 50  # steps per call of the compiled loop
SAVE_EVERY = 60  # seconds

Params = dict[str, Any]


class Corpus(NamedTuple):
    """Token ids for one target."""

    training: Data
    held_out: np.ndarray  # [n]
    name: str


def stdlib_corpus(directory: Path | None = None) -> Corpus:
    """The text that the embedded target was trained on, as bytes."""
    text = stdlib_text.read_text(directory)
    return Corpus(load_data(text), stdlib_text.join(text.held_out), stdlib_text.digest(text))


def text_corpus(directory: Path, files: list[Path]) -> Corpus:
    """Files (by default Python's standard library) as ids of a target's tokenizer."""
    tokenizer = lm.load_tokenizer(directory)
    if files:
        sources = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(files)]
    else:
        sources = [source.decode() for _, source in stdlib_text.read_text().library]
    documents = [np.asarray(tokenizer.encode(source), np.int32) for source in sources]
    held_out = documents[::HELD_OUT_EVERY]
    training = [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY] or documents
    joined = np.concatenate(training)
    starts = np.cumsum([0, *(len(document) for document in training[:-1])])
    data = Data(
        jnp.asarray(joined),
        jnp.asarray(starts, jnp.int32),
        jnp.asarray([len(joined)], jnp.int32),
        jnp.ones(1, jnp.float32),
    )
    return Corpus(data, np.concatenate(held_out), f"{len(documents)} documents")


class Target(NamedTuple):
    """What a head learns from."""

    model: lm.models.Llama
    params: Params

    def run(self, token_ids: jax.Array, layers: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Logits `[B, S, V]` and features `[B, S, A * H]` of whole sequences from position 0."""
        embedded = self.params["embed_tokens"][token_ids]
        positions = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
        whole = jnp.broadcast_to(positions, token_ids.shape)
        attend = causal_attention(self.model)
        return self.model.run(self.params, embedded, whole, attend, aux_hidden_state_layers=layers)


def sampled_pool(
    target: Target,
    prompts: Iterator[jax.Array],
    size: int,
    key: jax.Array,
    lowest: float = 1.0,
    seconds: float = math.inf,
) -> Any:
    """`[size, S]` on the host: windows that the target continued, in as small a type as fits.

    Each at a temperature between `lowest` and 1. They are fewer if `seconds` are over before.
    """
    begin = time.monotonic()
    dtype = np.uint8 if target.model.vocab_size <= 256 else np.int32
    parts: list[np.ndarray] = []
    while sum(map(len, parts)) < size and (not parts or time.monotonic() - begin < seconds):
        windows = next(prompts)
        key, now, heat = jax.random.split(key, 3)
        temperature = jax.random.uniform(heat, windows.shape[:1], minval=lowest, maxval=1.0)
        kept, never = windows.shape[1] // 4, jnp.zeros(0, jnp.int32)
        script = beginnings(windows, kept)
        sampled, _ = continue_windows(*target, script, kept, never, now, temperature)
        parts.append(np.asarray(sampled).astype(dtype))
    return np.concatenate(parts)[:size]


class Mixture(NamedTuple):
    """Half of the windows from a text, half from those that the target continued."""

    text: Data
    pool: Own

    def draw(self, key: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array]:
        """As `Own.draw`."""
        window_key, pool_key = jax.random.split(key)
        ids, wanted = self.pool.draw(pool_key, batch_size // 2)
        rest = batch_size - len(ids)
        text = sample_windows(self.text, window_key, rest, ids.shape[1] - 1)
        return (
            jnp.concatenate([text, ids]),
            jnp.concatenate([jnp.ones(text.shape, bool), wanted]),
        )


class Lessons(NamedTuple):
    """What a head learns from, and what it is judged by."""

    source: Mixture | Own  # to train on
    judged: dict[str, Own]  # on the host, by the names that results have
    texts: list[np.ndarray]  # token ids of all training text
    name: str


def continued_text(
    target: Target,
    corpus: Corpus,
    args: argparse.Namespace,
    lowest: float = 1.0,
    seconds: float = math.inf,
) -> Lessons:
    """A text, and windows of it that the target continues; see `sampled_pool` for the limits."""
    batch = min(SAMPLE_BATCH.get(jax.default_backend(), 64), args.sampled)
    draw_key, pool_key, held_key = jax.random.split(jax.random.key(args.seed + 1), 3)

    def prompts() -> Iterator[jax.Array]:
        for index in range(args.sampled):
            key = jax.random.fold_in(draw_key, index)
            yield sample_windows(corpus.training, key, batch, args.length - 1)

    pool = sampled_pool(target, prompts(), args.sampled, pool_key, lowest, seconds)
    starts = np.linspace(0, len(corpus.held_out) - args.length, batch).astype(int)
    held_out = np.stack([corpus.held_out[i : i + args.length] for i in starts]).astype(np.int32)
    own = sampled_pool(target, iter([jnp.asarray(held_out)]), batch, held_key, lowest)
    judged = {"held-out text": Own.all_of(held_out), "target's own": Own.all_of(own)}
    source = Mixture(corpus.training, Own(*map(jnp.asarray, Own.all_of(pool))))
    return Lessons(source, judged, [np.asarray(corpus.training.text), pool], corpus.name)


def own_windows(files: list[Path]) -> Lessons:
    """What `own_text.py` wrote; its held-out windows are judged by the temperature of sampling."""
    parts: dict[str, list[np.ndarray]] = {}
    for path in sorted(files):
        with np.load(path) as arrays:
            for name, array in arrays.items():
                parts.setdefault(name, []).append(array)
    whole = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    heat = whole["held_out_temperature"]
    judged = {
        f"own text at temperature {value:g}": Own(
            whole["held_out_ids"][heat == value], whole["held_out_wanted"][heat == value]
        )
        for value in np.unique(heat)
    }
    ids, wanted = whole["ids"], whole["wanted"]
    name = f"{len(ids)} windows of {ids.shape[1]} tokens, {wanted.sum()} of the target's own"
    return Lessons(Own(jnp.asarray(ids), jnp.asarray(wanted)), judged, [ids[wanted]], name)


def read_lessons(
    target: Target, args: argparse.Namespace, lowest: float = 1.0, seconds: float = math.inf
) -> Lessons:
    """What the options ask for."""
    if args.windows:
        return own_windows(args.windows)
    embedded = args.target is None
    corpus = stdlib_corpus(args.stdlib) if embedded else text_corpus(args.target, args.text)
    return continued_text(target, corpus, args, lowest, seconds)


def unrolled_attention(
    keys: list[jax.Array], values: list[jax.Array]
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Attention of one more step; `keys` and `values` `[B, N, N_kv, D]` are those of steps before.

    A query at i reads the keys j <= i of step 0, which come from true features, and the one key at
    i of each later step, its own included: those that drafting from i wrote.
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        keys.append(key)
        values.append(value)
        batch_size, length, num_kv, head_dim = key.shape
        query = query.reshape(batch_size, length, num_kv, -1, head_dim)
        wide = {"preferred_element_type": jnp.float32}
        scores = jnp.einsum("bikgd,bjkd->bkgij", query, keys[0], **wide)
        past = jnp.tril(jnp.ones((length, length), bool))
        scores = [jnp.where(past[None, None, None], scores, -jnp.inf)]
        scores += [
            jnp.einsum("bikgd,bikd->bkgi", query, drafted, **wide)[..., None]
            for drafted in keys[1:]
        ]
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * head_dim**-0.5, axis=-1)
        weights = weights.astype(value.dtype)
        read = jnp.einsum("bkgij,bjkd->bikgd", weights[..., :length], values[0])
        for step, drafted in enumerate(values[1:]):
            weight = jnp.einsum("bkgi->bikg", weights[..., length + step])
            read = read + weight[..., None] * drafted[:, :, :, None, :]
        return read.reshape(batch_size, length, -1, head_dim)

    return attend


class Measures(NamedTuple):
    """Of each of the T steps, over the positions where its target is known, `[T]`."""

    cross_entropy: jax.Array  # of the target's distribution over the listed ids, nats
    log_acceptance: jax.Array  # mean of log alpha
    acceptance: jax.Array  # mean of alpha = sum min(p, q), at temperature 1
    agreement: jax.Array  # share of positions where the argmaxes are the same


def unroll(
    head: lm.models.Eagle3Head, params: Params, features: jax.Array, tokens: jax.Array
) -> list[jax.Array]:
    """States `[B, S - 1, H]` of the T steps of drafting from each position of tokens `[B, S]`.

    Row i of step s has read the features up to i and the tokens up to i + 1 + s; `logits_of` gives
    its logits.
    """
    states = head.project(params, features[:, :-1])
    batch_size, count = states.shape[:2]
    positions = jnp.arange(count, dtype=jnp.int32)[None, :]
    attend = unrolled_attention([], [])
    steps = []
    for step in range(NUM_STEPS):
        shifted = jnp.roll(tokens[:, 1:], -step, axis=1)  # the last rows read what is not theirs
        embedded = params["embed_tokens"][shifted]
        rotary = jnp.broadcast_to(positions + step, (batch_size, count))
        _, states = head.run(params, states, embedded, rotary, attend)
        steps.append(states)
    return steps


def logits_of(head: lm.models.Eagle3Head, params: Params, states: jax.Array) -> jax.Array:
    """Logits `[B, S, Vd]` of the states `[B, S, H]` that a step of drafting hands to the next."""
    c = head.config
    if not c.norm_output:
        states = rms_norm(states, params["norm"], c.norm)
    return head_logits(c, params, states)


def measure(
    head: lm.models.Eagle3Head,
    params: Params,
    target: Target,
    tokens: jax.Array,
    wanted: jax.Array,
) -> Measures:
    """Unrolls the head over token ids `[B, S]`; drafts count where `wanted` `[B, S]`.

    `wanted[b, i]` is about the token at i + 1.
    """
    params = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(head.dtype), params)
    logits, features = jax.lax.stop_gradient(target.run(tokens, head.aux_hidden_state_layers))
    logits, wanted = logits[:, 1:], wanted[:, 1:]
    ids = params.get("target_ids")
    total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    likeliest = jnp.argmax(logits, axis=-1)
    # What the head cannot draft is never accepted: [B, S - 1, V] -> [B, S - 1, Vd]
    listed = logits if ids is None else jnp.take(logits, ids, axis=-1)

    @jax.checkpoint  # one step's logits at a time: those of all would fill a GPU
    def judge(step: jax.Array, states: jax.Array) -> list[jax.Array]:
        now, all_of_p, best_of_p = (jnp.roll(x, -step, axis=1) for x in (listed, total, likeliest))
        p = jnp.exp(now.astype(jnp.float32) - all_of_p[..., None])
        drafted = logits_of(head, params, states)
        log_q = jax.nn.log_softmax(drafted.astype(jnp.float32))
        mass = jnp.maximum(jnp.sum(p, axis=-1), 1e-9)
        best = jnp.argmax(drafted, axis=-1)
        alpha = jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)
        values = (
            -jnp.sum(p * log_q, axis=-1) / mass,
            jnp.log(jnp.maximum(alpha, 1e-6)),
            alpha,
            ((best if ids is None else ids[best]) == best_of_p).astype(jnp.float32),
        )
        known = jnp.arange(p.shape[1], dtype=jnp.int32)[None, :] < p.shape[1] - step
        known = (known & jnp.roll(wanted, -step, axis=1)).astype(jnp.float32)
        return [jnp.sum(value * known) / jnp.maximum(jnp.sum(known), 1) for value in values]

    measures = [judge(step, x) for step, x in enumerate(unroll(head, params, features, tokens))]
    return Measures(*map(jnp.stack, zip(*measures, strict=True)))


def make_chunk(
    head: lm.models.Eagle3Head, model: lm.models.Llama, args: argparse.Namespace
) -> Callable:
    """CHUNK training steps in one compiled loop; returns the state and the mean loss."""
    optimizer = make_optimizer(args.weight_decay)
    weights = jnp.asarray(STEP_DECAY ** np.arange(NUM_STEPS), jnp.float32)

    @partial(jax.jit, donate_argnums=0)
    def chunk(
        state: State, frozen: Params, target_params: Params, source: Mixture | Own, total: Any
    ) -> tuple[State, jax.Array]:
        target = Target(model, target_params)

        def step(state: State, _: None) -> tuple[State, jax.Array]:
            key, draw_key = jax.random.split(state.key)
            tokens, wanted = source.draw(draw_key, args.batch_size)
            now = state.step.astype(jnp.float32)
            by_acceptance = now >= args.acceptance_from * total

            def loss_fn(params: Params) -> jax.Array:
                found = measure(head, params | frozen, target, tokens, wanted)
                losses = jnp.where(by_acceptance, -found.log_acceptance, found.cross_entropy)
                return jnp.sum(weights * losses) / jnp.sum(weights)

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            rate = learning_rate(args.learning_rate, now, total, WARMUP_STEPS)
            return updated(optimizer, state, grads, rate, key), loss

        state, losses = jax.lax.scan(step, state, length=CHUNK)
        return state, losses.mean()

    return chunk


def frequent_ids(vocab_size: int, size: int, *texts: np.ndarray) -> np.ndarray:
    """The `size` most frequent ids, ascending; of equally frequent ones the lowest."""
    counts = sum(np.bincount(text.ravel(), minlength=vocab_size) for text in texts)
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def make_head(
    target: Target,
    size: int,
    layers: tuple[int, ...] | None,
    intermediate_size: int | None,
    *texts: np.ndarray,
) -> tuple[lm.models.Eagle3Head, Params]:
    """A head of `size` ids, like a layer of the target; the frozen part of its weights.

    Its layers of features and its feed-forward size are the usual ones and the target's where they
    are None.
    """
    c = target.model.config
    first = c.layers[0]
    count = len(c.layers)
    layer = dataclasses.replace(
        first, qkv_bias=False, intermediate_size=intermediate_size or first.intermediate_size
    )
    head = lm.models.Eagle3Head(
        lm.models.Eagle3Config.of_target(
            c,
            layers=(layer,),
            draft_vocab_size=size,
            aux_hidden_state_layers=layers or (2, count // 2, count - 3),
            own_lm_head=size < c.vocab_size,
        ),
        target.model.dtype,
    )
    tied = c.tie_word_embeddings
    lm_head = target.params["embed_tokens" if tied else "lm_head"]
    frozen = {"embed_tokens": target.params["embed_tokens"], "lm_head": lm_head}
    if size < c.vocab_size:
        ids = frequent_ids(c.vocab_size, size, *texts)
        rows = lm_head[ids].T if tied else lm_head[:, ids]
        frozen |= {"lm_head": rows, "target_ids": jnp.asarray(ids, jnp.int32)}
    return head, frozen


def run_chunks(
    chunk: Callable[[State, jax.Array], tuple[State, jax.Array]],
    state: State,
    args: argparse.Namespace,
    seconds: float,
    save: Callable[[State], None] = lambda state: None,
) -> tuple[State, list[dict[str, float]]]:
    """Trains for args.steps steps, or as many as fit into `seconds`; the last state and losses.

    `chunk(state, total)` is CHUNK steps of `total`; `save(state)` is called now and then.
    """
    begin = saved = time.monotonic()
    total, log, done = args.steps, [], 0
    while done < total and time.monotonic() - begin < max(seconds, 1):
        tick = time.monotonic()
        state, loss = chunk(state, jnp.float32(total))
        loss, done = float(loss), int(state.step)
        now = time.monotonic()
        if done == 2 * CHUNK:  # the first chunk was compilation, mostly
            left = seconds - (now - begin)
            total = min(total, done + max(0, int(0.95 * left / (now - tick))) * CHUNK)
            print(f"{(now - tick) / CHUNK * 1e3:.1f} ms a step: {total} steps in all", flush=True)
        log.append({"step": done, "loss": round(loss, 4)})
        if len(log) % args.print_every == 1 or args.print_every == 1 or done >= total:
            print(f"{now - begin:6.0f} s  step {done}  loss {loss:.4f}", flush=True)
        if now - saved > SAVE_EVERY:
            saved = now
            save(state)
    return state, log


def train(
    target: Target,
    head: lm.models.Eagle3Head,
    frozen: Params,
    source: Mixture | Own,
    args: argparse.Namespace,
    seconds: float,
    save: Callable[[Params], None],
) -> tuple[Params, list[dict[str, float]]]:
    """Trains for args.steps steps, or as many as fit into `seconds`; weights and losses."""
    init_key, key = jax.random.split(jax.random.key(args.seed))
    if args.init is None:
        first = dataclasses.replace(head, dtype=jnp.float32).init_params(init_key)
    else:
        of_target = lm.formats.LoadedModel(*target)
        first = lm.load_head(args.init, of_target, lm.models.Eagle3Head).params
    params = {name: x for name, x in first.items() if name not in FROZEN}
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    state = State(params, make_optimizer(args.weight_decay).init(params), jnp.int32(0), key)
    chunk = make_chunk(head, target.model, args)

    def weights(state: State) -> Params:
        return jax.tree.map(lambda x: x.astype(head.dtype), state.params) | frozen

    state, log = run_chunks(
        lambda state, total: chunk(state, frozen, target.params, source, total),
        state,
        args,
        seconds,
        lambda state: save(weights(state)),
    )
    save(weights(state))
    return weights(state), log


def save_head(
    directory: Path, head: lm.models.Eagle3Head, args: argparse.Namespace, params: Params
) -> None:
    """Writes a head in the layout of speculators, in bfloat16."""
    name = target_name(args)
    lm.formats.save_eagle3(directory, head, params, jnp.bfloat16, target_name=name)
    if args.leave_out_shared:
        path = directory / "model.safetensors"
        tensors = safetensors.numpy.load_file(path)
        own = {x: tensor for x, tensor in tensors.items() if x.split(".")[0] not in FROZEN}
        safetensors.numpy.save_file(own, path)


def target_name(args: argparse.Namespace) -> str:
    """The name of the target, for files."""
    return "embedded target" if args.target is None else args.target.name


def load_target(args: argparse.Namespace) -> Target:
    """The target, in the compute dtype of the device."""
    attention_implementation()  # outside of jit first
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    if args.target is None:
        return Target(*lm.load_embedded_pair(dtype)[0])
    return Target(*lm.load_huggingface(args.target, dtype))


def write_record(directory: Path, args: argparse.Namespace, lessons: Lessons, **found: Any) -> None:
    """Writes `training.json`: the device, the options and what was found."""
    options = {k: v for k, v in vars(args).items() if not isinstance(v, Path | list) or k in LISTS}
    record = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "attention": attention_implementation(),
        "text": lessons.name,
        "target": target_name(args),
        **options,
        **found,
    }
    (directory / "training.json").write_text(json.dumps(record, indent=2) + "\n")


@partial(jax.jit, static_argnums=(0, 1))
def measure_batch(
    head: lm.models.Eagle3Head,
    model: lm.models.Llama,
    params: Params,
    target_params: Params,
    tokens: jax.Array,
    wanted: jax.Array,
) -> Measures:
    """`measure`, compiled."""
    return measure(head, params, Target(model, target_params), tokens, wanted)


def batches(windows: Own, batch_size: int) -> list[tuple[jax.Array, jax.Array]]:
    """Whole batches of windows: token ids and where they are wanted, `[B, S]`."""
    size = min(len(windows.ids), batch_size)
    return [
        (
            jnp.asarray(windows.ids[first : first + size], jnp.int32),
            jnp.asarray(windows.wanted[first : first + size]),
        )
        for first in range(0, len(windows.ids) - size + 1, size)
    ]


def evaluate(
    head: lm.models.Eagle3Head, params: Params, target: Target, windows: Own, batch_size: int
) -> dict[str, list[float]]:
    """Acceptance and greedy agreement of each step, over windows `[M, S]`."""
    found = [
        measure_batch(head, target.model, params, target.params, *batch)
        for batch in batches(windows, batch_size)
    ]
    mean = jax.tree.map(lambda *x: np.mean([np.asarray(v, np.float64) for v in x], 0), *found)
    return {
        name: [round(float(value), 4) for value in getattr(mean, name)]
        for name in ("acceptance", "agreement")
    }


def show(name: str, found: dict[str, list[float]]) -> None:
    """Prints what `evaluate` found."""
    for kind, values in found.items():
        length = 1 + np.cumprod(values).sum()
        steps = " ".join(f"{value:.4f}" for value in values)
        print(f"  {name:26} {kind:10} by step {steps}  1 + products {length:.3f}", flush=True)


def add_options(
    parser: argparse.ArgumentParser, batch_size: int, length: int, windows: int
) -> None:
    """What all trainings of heads take; the defaults for a GPU."""
    on_gpu, add = jax.default_backend() == "gpu", parser.add_argument
    add("--target", type=Path, help="checkpoint with a tokenizer; default: the embedded target")
    add("--text", type=Path, nargs="*", default=[], help="files to learn from, with --target")
    add("--windows", type=Path, nargs="*", default=[], help="or files of own_text.py")
    add("--stdlib", type=Path, help="folder that stands for Python's, without --target")
    add("--layers", type=int, nargs="+", help="feature layers; default: 2, L // 2, L - 3")
    add("--intermediate-size", type=int, help="of feed-forward layers; default: the target's")
    add("--batch-size", type=int, default=batch_size if on_gpu else 16, help="windows per step")
    add("--length", type=int, default=length, help="tokens per window")
    add("--sampled", type=int, default=windows if on_gpu else 2**11, help="windows from the target")
    add("--learning-rate", type=float, default=1e-3, help="peak")
    add("--weight-decay", type=float, default=0.01, help="of matrices")
    add("--seed", type=int, default=0)
    add(
        "--init", type=Path, help="head of the same sizes to begin with, in place of random weights"
    )
    add("--print-every", type=int, default=10, help=f"in chunks of {CHUNK} steps")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments, with the defaults that depend on the device filled in."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for one folder per head, vocab_SIZE")
    add("--vocab-size", type=int, nargs="+", help="Vd of each head; default: V, and 64 if embedded")
    add("--leave-out-shared", action="store_true", help="do not write what is the target's")
    add("--steps", type=int, default=20000 if on_gpu else 1000, help="at most, per head")
    add("--minutes", type=float, default=7.0 if on_gpu else 60.0, help="for all heads together")
    add("--acceptance-from", type=float, default=0.75, help="share of steps before -log alpha")
    add_options(parser, batch_size=256, length=256, windows=2**17)
    args = parser.parse_args(arguments)
    if args.batch_size < 2 or args.length < 2 * NUM_STEPS:
        parser.error(f"--batch-size must be at least 2, --length at least {2 * NUM_STEPS}")
    return args


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    begin = time.monotonic()
    args = parse_args(arguments)
    target = load_target(args)
    size = target.model.vocab_size
    sizes = args.vocab_size or ([size, 64] if args.target is None else [size])
    lessons = read_lessons(target, args)
    print(f"{time.monotonic() - begin:6.0f} s  {lessons.name}", flush=True)

    for index, size in enumerate(sizes):
        layers = None if args.layers is None else tuple(args.layers)
        head, frozen = make_head(target, size, layers, args.intermediate_size, *lessons.texts)
        left = 60 * args.minutes - (time.monotonic() - begin)
        print(f"head of {size} ids, feature layers {head.aux_hidden_state_layers}", flush=True)
        directory = args.out / f"vocab_{size}"
        params, log = train(
            target, head, frozen, lessons.source, args, left / (len(sizes) - index),
            partial(save_head, directory, head, args),
        )  # fmt: skip
        write_record(directory, args, lessons, log=log)
        results = {}
        for name, windows in lessons.judged.items():
            results[name] = evaluate(head, params, target, windows, args.batch_size)
            show(name, results[name])
        write_record(directory, args, lessons, results=results, log=log)
        print(f"{time.monotonic() - begin:6.0f} s  wrote {directory}", flush=True)


if __name__ == "__main__":
    main()
