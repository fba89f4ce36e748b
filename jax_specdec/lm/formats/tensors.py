"""The tensors of a checkpoint, ``[out, in]`` under Hugging Face names, and params of a model.

Reading fuses and transposes to the layout of `param_shapes`, once, tensor by tensor: no more than
one fused matrix is in memory beside the params. Writing undoes it. Both go through the parts of
params, those of a Llama or of a head, beside the names of the tensors that make them up.

Every tensor is called for by the config, or the checkpoint is refused: one that nobody reads is a
sign that the model computes something else. `check_tensors` says which exceptions there are, and
looks at headers alone, so that a checkpoint that does not fit is refused before weights are read.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec.lm.extras import extra
from jax_specdec.lm.formats.families import LAYER_TENSORS, TEXT_PREFIXES
from jax_specdec.lm.formats.files import existing, instead_of, is_there, read_json
from jax_specdec.lm.models.config import DecoderConfig, LayerSpec, Shapes, param_shapes
from jax_specdec.lm.models.fields import quoted, reason, shown
from jax_specdec.lm.models.int8 import NOT_PRODUCTS, Int8Weight, quantized
from jax_specdec.lm.models.protocol import Params

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
_BY_ID = ("embed_tokens", "embed_tokens_per_layer", "markov_w1", "markov_w2")
"""Arrays that have a row for each id here, as in the file; others are transposed."""
_OF_VOCABULARY = ("embed_tokens", "embed_tokens_per_layer", "lm_head")
"""Arrays whose tensors have a row for each id of the vocabulary."""
_ROWS = 1024
"""Rows of a large matrix that are in memory at once, where two of them are compared."""

_SCALE = "_scale"
"""Follows the name of a weight in int8, and names the scale of each of its rows."""
_ZERO_POINT = "_zero_point"
"""Likewise the integer of each row that means 0, which must be 0."""
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
"""Stand beside a weight in int8, and are not read: activations stay in the compute dtype."""

# JAX has no float64 unless it is asked to, and no model needs it.
_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes that are read, by their names in the file, and what holds them here."""


class _Stored(NamedTuple):
    """Where a tensor is: the path of a file, the open file, and the tensor's name in it.

    The name may be another than the one that it is looked up by: see `Tensors.without`.
    """

    path: Path
    file: Any  # of safetensors, which has no types
    name: str


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors in the open files of a checkpoint.

    Attributes:
      origin: the file that names all of them.
      stored: where each is, by its name here.
    """

    origin: Path
    stored: dict[str, _Stored]

    def without(self, prefix: str, usual: str = "") -> "Tensors":
        """Returns the tensors under other names: with `usual` in place of a `prefix`.

        Raises:
          ValueError: two tensors get the same name.
        """
        stored: dict[str, _Stored] = {}
        # Sorted, so that an error names two tensors in the same order on every run.
        for old, tensor in sorted(self.stored.items()):
            new = usual + old.removeprefix(prefix) if old.startswith(prefix) else old
            other = stored.setdefault(new, tensor)
            if other is not tensor:
                both = f"{shown(other.name)} and {shown(tensor.name)}"
                raise ValueError(f"{shown(self.origin)} has both {both}.")
        return Tensors(self.origin, stored)

    def of_text(self, unread: tuple[str, ...]) -> "Tensors":
        """Returns the tensors of a decoder, by their names in files of text alone.

        Without those whose names begin with something in `unread`, see `Family`.
        """
        of_decoder = {x: at for x, at in self.stored.items() if not x.startswith(unread)}
        tensors = Tensors(self.origin, of_decoder)
        # In the order of the table: its last prefix is the beginning of its first.
        for prefix, usual in TEXT_PREFIXES.items():
            tensors = tensors.without(prefix, usual)
        return tensors

    def where(self, name: str) -> str:
        """Returns what messages call the file that holds a tensor."""
        return shown(self.stored[name].path)

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor, from disk, in its stored dtype. Nothing keeps it."""
        stored = self.stored[name]
        return stored.file.get_tensor(stored.name)

    def form(self, name: str) -> tuple[tuple[int, ...], str]:
        """Returns the shape of a tensor, and its dtype as the file calls it; reads no weights."""
        stored = self.stored[name]
        form = stored.file.get_slice(stored.name)
        return tuple(form.get_shape()), form.get_dtype()

    def dtype(self, name: str) -> str:
        """Returns the dtype that holds a tensor of floating-point numbers here."""
        return _DTYPES[self.form(name)[1]]


@contextlib.contextmanager
def open_tensors(
    directory: Path, config: DecoderConfig, unread: tuple[str, ...] = ()
) -> Iterator[Tensors]:
    """Opens the weights of a checkpoint, one file or shards, and checks them against the config.

    Names are those of files of text alone. Files stay open as long as the context. What `unread`
    is, `Tensors.of_text` says.

    Raises:
      FileNotFoundError: a file is missing.
      OSError: something other than a file is in its place, or it cannot be opened.
      ValueError: a file cannot be parsed, the index names a file outside the directory, or a tensor
        is missing, unknown, or of another shape or kind than the config says.
    """
    with open_files(directory) as files:
        tensors = files.of_text(unread)
        # Some writers store it though it is tied. Then it is checked like any tensor, and the
        # caller decides whether it is used: see `stores_own_head`.
        if _LM_HEAD in tensors.stored:
            config = dataclasses.replace(config, tie_word_embeddings=False)
        shapes = parts(param_shapes(config))
        # Some writers store keys and values of layers that read those of others.
        others = [
            f"model.layers.{index}.self_attn.{name}.weight"
            for index, spec in enumerate(config.layers)
            if spec.keys_of is not None
            for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        ]
        check_tensors(tensors, tensor_shapes(decoder_tensors(config), shapes), others)
        yield tensors


@contextlib.contextmanager
def open_files(directory: Path) -> Iterator[Tensors]:
    """Opens the weights of a checkpoint, whatever they are; raises as `open_tensors` does."""
    # One file goes before an index beside it, which is then not looked at.
    origin = directory / WEIGHTS_FILE
    with contextlib.ExitStack() as stack:
        if is_there(origin):
            file = _open_file(origin, stack)
            tensors = Tensors(origin, {x: _Stored(origin, file, x) for x in file.keys()})
        else:
            tensors = _open_shards(directory, stack)
        yield tensors


def _open_shards(directory: Path, stack: contextlib.ExitStack) -> Tensors:
    """Returns the tensors of all files that an index names; raises as `open_tensors` does."""
    index = directory / INDEX_FILE
    if not is_there(index):
        raise FileNotFoundError(
            f"{shown(directory / WEIGHTS_FILE)} does not exist, nor does {INDEX_FILE}; a "
            f"checkpoint directory must hold one of them{instead_of(directory / WEIGHTS_FILE)}."
        )
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(x, str) for x in shard_of.values()):
        raise ValueError(
            f"{shown(index)} lacks a weight_map from names of tensors to names of files."
        )
    files = {}
    for shard in sorted(set(shard_of.values())):
        # A link to a file elsewhere, as in the hub's cache, is the owner's doing; a path in the
        # index is the author's.
        if Path(shard).anchor or ".." in Path(shard).parts:
            raise ValueError(
                f"{shown(index)} has the file {quoted(shard)} in its weight_map, which must not "
                "leave the directory."
            )
        path = directory / shard
        if not is_there(path):
            raise FileNotFoundError(f"{shown(path)} does not exist, but {INDEX_FILE} lists it.")
        files[shard] = _open_file(path, stack)
    # A tensor that a shard has and the index does not list is not read, and not missed.
    held = {shard: set(file.keys()) for shard, file in files.items()}
    stored = {}
    for name, shard in shard_of.items():
        path = directory / shard
        if name not in held[shard]:
            raise ValueError(
                f"{shown(path)} lacks the tensor {shown(name)}, which {INDEX_FILE} says it holds."
            )
        stored[name] = _Stored(path, files[shard], name)
    return Tensors(index, stored)


def _open_file(path: Path, stack: contextlib.ExitStack) -> Any:
    """Returns one open file; raises as `open_tensors` does."""
    with extra("lm"):
        import safetensors
    existing(path)
    try:
        return stack.enter_context(safetensors.safe_open(path, framework="np"))
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{shown(path)} is not a readable safetensors file: {reason(error)}."
        ) from error
    except OSError as error:
        raise OSError(f"{shown(path)} cannot be opened: {reason(error)}.") from error


def check_tensors(
    tensors: Tensors,
    shapes: Iterable[tuple[str, str, tuple[int, ...]]],
    others: Collection[str] = (),
) -> None:
    """Raises ValueError if a tensor is missing, unknown, or of another shape or kind.

    `shapes` are the array, name and shape ``[out, in]`` of each that must be there; what is in
    `others` may be there, and the caller checks it.
    """
    expected = set(others)
    # They are made one by one, and the first that is missing ends it.
    for array, name, shape in shapes:
        if name not in tensors.stored:
            raise ValueError(f"{shown(tensors.origin)} lacks the tensor {name}.")
        expected.add(name)
        has = f"{tensors.where(name)} has {name}"
        stored_shape, kind = tensors.form(name)
        if stored_shape != shape:
            raise ValueError(
                f"{has} of shape {quoted(stored_shape)}, but its config.json says {shape}."
            )
        # An embedding whose rows are looked up, or a norm, is never read in int8.
        is_product = len(shape) == 2 and array not in NOT_PRODUCTS
        if kind == "I8" and is_product and name + _SCALE in tensors.stored:
            expected |= {name + _SCALE, name + _ZERO_POINT}
            expected |= {name.removesuffix("weight") + x for x in _OF_ACTIVATIONS}
            # Some writers store the zero points of symmetric weights.
            if name + _ZERO_POINT in tensors.stored and tensors.read(name + _ZERO_POINT).any():
                must = "weights in int8 must be symmetric"
                raise ValueError(f"{has}{_ZERO_POINT} that is not zero, but {must}.")
            # A scale of each row: [out, 1], or [out]. It is its dtype that must be one of those
            # that are read, in place of the weight's.
            stored_shape, kind = tensors.form(name + _SCALE)
            if stored_shape not in ((shape[0],), (shape[0], 1)):
                needs = f"{(shape[0], 1)}, a scale of each row"
                raise ValueError(
                    f"{has}{_SCALE} of shape {quoted(stored_shape)}, but it must be {needs}."
                )
        if kind not in _DTYPES:
            listed = ", ".join(_DTYPES)
            raise ValueError(f"{has} of dtype {kind}, but only {listed} are supported.")
    for name in tensors.stored:
        # Old checkpoints hold the frequencies of rotation, which the config says, too.
        if name not in expected and not name.endswith(".rotary_emb.inv_freq"):
            raise ValueError(
                f"{tensors.where(name)} has a tensor {shown(name)}, which its config.json does not "
                "call for."
            )


def stores_own_head(tensors: Tensors, dtype: np.dtype) -> bool:
    """Returns whether an output matrix is stored that differs from the embedding in a dtype.

    `transformers` then uses it, whatever the config says.
    """
    if _LM_HEAD not in tensors.stored:
        return False
    both = [tensors.stored[name] for name in (EMBEDDING, _LM_HEAD)]
    pair = [stored.file.get_slice(stored.name) for stored in both]
    size = pair[0].get_shape()[0]
    # The two may be the largest of the file: they are read in pieces, up to the first difference.
    # NaN differs from itself, so a matrix with one is read as its own, and refused if it has to be.
    for start in range(0, size, _ROWS):
        end = min(start + _ROWS, size)
        with np.errstate(over="ignore"):
            rows = [x[start:end].astype(dtype) for x in pair]  # two [ROWS, H] of [V, H]
        if not np.array_equal(*rows):
            return True
    return False


def check_finite(owner: str, name: str, tensor: np.ndarray, dtype: np.dtype) -> None:
    """Checks that no weight is NaN or infinite in `dtype`."""
    # The bits of floating-point numbers of one sign are integers in the order of magnitude, NaN
    # last: the largest signed integer is the largest positive number (if there is one), the largest
    # unsigned integer the largest negative one. NumPy is fast with integers of every width. So two
    # numbers decide for the tensor, also by the rounding of a dtype that is narrower.
    for kind in ("int", "uint"):
        bits = tensor.view(f"{kind}{8 * tensor.itemsize}")
        stored = bits.max().view(tensor.dtype)
        with np.errstate(over="ignore"):
            held = stored.astype(dtype)
        if not np.isfinite(held):
            raise ValueError(
                f"{owner} has {name} with a weight of {stored}, which is {held} in {dtype}; "
                "weights must be finite unless allow_nonfinite is true."
            )


class Names(NamedTuple):
    """The tensors that make up the arrays of a dict, one of the `parts` of params.

    Attributes:
      tensors: names of those of each array, in the order in which they are fused.
      sizes: of each array of several tensors, the size of each on its last axis. Only writing and
        checks need it: a file has the sizes in its tensors.
    """

    tensors: dict[str, list[str]]
    sizes: dict[str, Sequence[int]] = {}


def parts(tree: Params | Shapes) -> Iterator[dict[str, Any]]:
    """Yields the dicts of params, or of their shapes: the model's own, and that of each layer.

    The first holds the layers too, under a name that no `Names` lists. An EAGLE-3 head has one
    `layer` in place of `layers`.
    """
    yield tree
    yield from tree["layers"] if "layers" in tree else [tree["layer"]]


def read_arrays(
    tensors: Tensors,
    names: Iterable[Names],
    dtype: np.dtype,
    *,
    vocab_size: int | None = None,
    allow_nonfinite: bool = False,
    int8: bool = False,
) -> list[dict[str, jax.Array | Int8Weight]]:
    """Returns the arrays of each of the `parts` of params, of the tensors of these names.

    Ids from `vocab_size` on are left out. Matrices that are stored in int8 stay so, and with `int8`
    others become so as soon as they are read. Raises ValueError where a weight is NaN or infinite
    in `dtype`, unless that is allowed, or where a part of a fused matrix alone is stored in int8.
    """

    def load(name: str, size: int | None, dtype: np.dtype = dtype) -> jax.Array:
        tensor = tensors.read(name)[:size]
        if not allow_nonfinite:
            check_finite(tensors.where(name), name, tensor, dtype)
        with np.errstate(over="ignore"):  # float64 may be held as float32
            return jax.device_put(tensor).astype(dtype)

    def fused(array: str, stored: list[str]) -> jax.Array | Int8Weight:
        # [V, H] -> [size, H] as it comes from disk
        size = vocab_size if array in _OF_VOCABULARY else None
        # Queries, keys and values are one matrix here, of one dtype.
        in_int8 = [name for name in stored if tensors.form(name)[1] == "I8"]
        if in_int8 and in_int8 != stored:
            other = next(name for name in stored if name not in in_int8)
            where = tensors.where(other)
            raise ValueError(f"{where} has {other} of another dtype than {in_int8[0]}, of int8.")
        if in_int8:
            # [out, in] of each tensor -> [out of all, in]; [out] or [out, 1] -> [out of all]
            values = [jax.device_put(tensors.read(name)[:size]) for name in stored]
            scales = [load(name + _SCALE, size, np.dtype("float32")).ravel() for name in stored]
            return Int8Weight(jnp.concatenate(values), jnp.concatenate(scales))
        # [out, in] of each tensor -> [out of all, in] -> [in, out of all]
        loaded = [load(name, size) for name in stored]
        whole = jnp.concatenate(loaded) if len(loaded) > 1 else loaded[0]
        # `quantized` takes the order of the file, [out, in], and keeps it.
        if int8 and whole.ndim == 2 and array not in NOT_PRODUCTS:
            return quantized(whole)
        return whole if array in _BY_ID else whole.T  # XLA transposes faster than NumPy

    return [
        {array: fused(array, stored) for array, stored in part.tensors.items()} for part in names
    ]


def unfuse(names: Iterable[Names], params: Params) -> dict[str, np.ndarray]:
    """Returns the tensors ``[out, in]`` of params by name, the inverse of `read_arrays`."""
    tensors = {}
    for part, arrays in zip(names, parts(params), strict=True):
        for array, fused in part.tensors.items():
            # Without sizes there is one tensor, and nothing to split at.
            ends = np.cumsum(part.sizes.get(array, []))[:-1]
            # [in, out of all tensors] -> [in, out] of each -> [out, in]
            pieces = np.split(np.asarray(arrays[array]), ends, axis=-1)
            for name, piece in zip(fused, pieces, strict=True):
                tensors[name] = piece if array in _BY_ID else piece.T
    return tensors


def tensor_shapes(
    names: Iterable[Names], shapes: Iterable[Shapes]
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yields array, name and shape ``[out, in]`` of each tensor `unfuse` makes of such shapes."""
    for part, arrays in zip(names, shapes, strict=True):
        for array, fused in part.tensors.items():
            # [in, out of all tensors] -> [out, in] of each; a norm or a bias has no [in].
            *inner, last = arrays[array]
            for name, size in zip(fused, part.sizes.get(array, [last]), strict=True):
                yield array, name, arrays[array] if array in _BY_ID else (size, *inner)


def decoder_tensors(config: DecoderConfig) -> Iterator[Names]:
    """Yields the names of each of the `parts` of a `Llama`."""
    shapes, *layers = parts(param_shapes(config))
    names = {array: [f"model.{array}.weight"] for array in shapes if array != "layers"}
    # The output matrix alone stands outside `model`.
    yield Names(names | {"lm_head": [_LM_HEAD]} if "lm_head" in shapes else names)
    for index, (spec, arrays) in enumerate(zip(config.layers, layers, strict=True)):
        yield layer_tensors(spec, arrays, f"model.layers.{index}")


def layer_tensors(spec: LayerSpec, arrays: Collection[str], prefix: str) -> Names:
    """Returns which tensors make up the arrays of a layer, whose names begin with a prefix."""
    heads = spec.head_sizes
    tensors = {array: [f"{prefix}.{x}" for x in LAYER_TENSORS[array]] for array in arrays}
    # A layer that reads the keys of another has queries alone, and one whose values are its keys
    # has no matrix for values: `head_sizes` has one or two entries then.
    for array in ("qkv_proj", "qkv_bias"):
        if array in tensors:
            tensors[array] = tensors[array][: len(heads)]
    gate_up = [spec.intermediate_size] * 2
    return Names(tensors, {"qkv_proj": heads, "qkv_bias": heads, "gate_up_proj": gate_up})
