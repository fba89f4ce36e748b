"""Records what `transformers` computes with a published model, read from its GGUF file.

    python -m venv venv
    venv/bin/pip install torch transformers gguf accelerate sentencepiece protobuf
    venv/bin/python tests/formats/published/make.py NAME FILE.gguf

`transformers` dequantizes the weights and makes the tokenizer by its own code, so that nothing of
`tools/make_model.py` has a part in these values. Of pieces with scores and no merges, as Gemma has
them, it makes another tokenizer; there the ids are those of the library `sentencepiece`.

Writes `NAME.npz` beside this file, of each text: its ids and those of a greedy continuation; of
each row of their logits in float32 about 256 (every V // 256th), the largest and the log-sum-exp;
the text of the continuation; and its margins, the largest logit less the second.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
NUM_COLUMNS = 256
NUM_NEW = 40
CONVERSATION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = {
    "prompt": "The capital of France is Paris. The capital of Italy is",
    "mixed": "def f(x1):\n\treturn x1 + 1024  # größer 草 🙂, it's 1789.\n\n",
}


def pieces_of(path: str) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Returns how SentencePiece encodes and decodes by the pieces of a GGUF file."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    fields = gguf.GGUFReader(path).fields
    tokens, scores, kinds = (
        fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores", "token_type")
    )
    made = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        is_unknown = token == "<unk>"
        is_normal = kind == gguf.TokenType.NORMAL
        made.pieces.add(
            piece=token if is_normal else token.replace(" ", "\u2581"),
            score=score if is_normal else 0.0,
            type=gguf.TokenType.UNKNOWN if is_unknown else kind,  # numbered alike
        )
    trainer, normalizer = made.trainer_spec, made.normalizer_spec
    trainer.model_type, trainer.byte_fallback, trainer.vocab_size = 2, True, len(tokens)
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
    trainer.pad_piece, trainer.eos_piece, trainer.bos_piece = "<pad>", "<eos>", "<bos>"
    normalizer.name, normalizer.add_dummy_prefix = "identity", False
    normalizer.remove_extra_whitespaces = False
    found = sentencepiece.SentencePieceProcessor(model_proto=made.SerializeToString())
    return lambda text: [found.bos_id(), *found.encode(text)], found.decode


@torch.no_grad()
def main(name: str, path: str) -> None:
    folder, file = str(Path(path).parent), Path(path).name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32
    )
    texts = dict(TEXTS)
    if model.config.model_type == "gemma3_text":
        encode, decode = pieces_of(path)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
        encode, decode = (
            tokenizer.encode,
            functools.partial(tokenizer.decode, skip_special_tokens=True),
        )
        texts["chat"] = tokenizer.apply_chat_template(
            CONVERSATION, tokenize=False, add_generation_prompt=True
        )
    recorded: dict[str, np.ndarray] = {}
    for text_name, text in texts.items():
        token_ids = encode(text)
        continued = list(token_ids)
        past = None
        for _ in range(NUM_NEW):
            rows = continued if past is None else continued[-1:]
            output = model(torch.tensor([rows]), past_key_values=past, use_cache=True)
            past = output.past_key_values
            continued.append(int(output.logits[0, -1].argmax()))
        rows = model(torch.tensor([continued])).logits[0].double()
        first = len(token_ids) - 1
        continuation = decode(continued[len(token_ids) :])
        best = rows[first:-1].topk(2).values
        recorded |= {
            f"{text_name}_text": np.array(text),
            f"{text_name}_token_ids": np.array(continued, np.int32),
            f"{text_name}_num_prompt_tokens": np.int32(len(token_ids)),
            f"{text_name}_continuation": np.array(continuation),
            f"{text_name}_logits": rows[:, :: rows.shape[1] // NUM_COLUMNS].float().numpy(),
            f"{text_name}_largest": rows.max(dim=1).values.float().numpy(),
            f"{text_name}_log_sum_exp": rows.logsumexp(dim=1).float().numpy(),
            f"{text_name}_margins": (best[:, 0] - best[:, 1]).float().numpy(),
        }
        print(text_name, len(token_ids), repr(text), repr(continuation))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    np.savez_compressed(HERE / f"{name}.npz", made_by=np.array(versions), **recorded)


if __name__ == "__main__":
    main(*sys.argv[1:])
