"""Makes the tiny random checkpoints beside this file, and what `transformers` computes from them.

    python -m venv venv && venv/bin/pip install torch transformers
    venv/bin/python tests/formats/huggingface/make.py

Each directory is what `save_pretrained` writes, a byte-level tokenizer that all of them share, and
`expected.npz`: a text and its ids, their logits in float32, and a greedy continuation.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
TEXT = (
    "A drafter proposes and the target disposes: what it would not have said, it does not say. "
    "Ein Entwurf ist schnell gemacht, die Prüfung dauert länger. 草稿很快，检查更慢。 Vérifions 🙂!"
)
PROMPT = "The target said: größer 草🙂"
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>"]
NUM_MERGES = 24


def make_tokenizer(path: Path) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + NUM_MERGES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    tokenizer.save(str(path))
    return tokenizer


def randomize(model: torch.nn.Module, num_tokens: int, seed: int) -> None:
    """Weights large enough for every part to show in the logits, most of all the padding."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            adds_one = model.config.model_type in ("gemma2", "gemma3_text")  # not Gemma 4
            weight.data = (not adds_one) + 0.3 * noise
        elif name.endswith("bias"):
            weight.data = 0.5 * noise
        else:
            weight.data = 1.5 * weight.shape[1] ** -0.5 * noise
    for matrix in (model.get_output_embeddings().weight, model.get_input_embeddings().weight):
        matrix.data[num_tokens:] = 4 * torch.randn(
            matrix.data[num_tokens:].shape, generator=generator
        )


def save(name: str, model: transformers.PreTrainedModel, **options: object) -> None:
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    tokenizer = make_tokenizer(directory / "tokenizer.json")
    ends = [tokenizer.token_to_id(token) for token in SPECIAL[1:]]
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.token_to_id(SPECIAL[0]), eos_token_id=ends, pad_token_id=ends[0]
    )
    model.save_pretrained(directory, **options)

    model = type(model).from_pretrained(directory, dtype=torch.float32).eval()
    padding = list(range(tokenizer.get_vocab_size(), model.config.vocab_size))
    token_ids = tokenizer.encode(TEXT).ids
    prompt = torch.tensor([tokenizer.encode(PROMPT).ids])
    with torch.no_grad():
        logits = model(torch.tensor([token_ids[:24]])).logits[0]
        greedy = model.generate(
            prompt, do_sample=False, max_new_tokens=24, suppress_tokens=padding
        )[0, prompt.shape[1] :].tolist()
    np.savez_compressed(
        directory / "expected.npz",
        text=TEXT,
        token_ids=np.array(token_ids, np.int32),
        logits=logits.numpy(),
        prompt=PROMPT,
        prompt_token_ids=prompt.numpy().astype(np.int32)[0],
        greedy_token_ids=np.array(greedy, np.int32),
        greedy_text=tokenizer.decode(greedy),
    )
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    print(name, sum(sizes.values()), json.dumps(sizes))


def main() -> None:
    num_tokens = 256 + NUM_MERGES + len(SPECIAL)
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,  # fast, slow and interpolated pairs in D = 8
    }
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **shape,
            vocab_size=304,
            num_attention_heads=3,
            num_key_value_heads=1,
            tie_word_embeddings=False,
            max_position_embeddings=512,
            rope_parameters=scaling,
        )
    )
    randomize(llama, num_tokens, seed=1)
    save("llama", llama, max_shard_size="50KB")

    def qwen2(vocab_size: int) -> transformers.Qwen2ForCausalLM:
        config = transformers.Qwen2Config(
            **{**shape, "hidden_size": 32},
            vocab_size=vocab_size,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
        )
        model = transformers.Qwen2ForCausalLM(config)
        randomize(model, num_tokens, seed=2)
        return model

    target, draft = qwen2(288), qwen2(312)
    save("qwen2", target)
    # Nearly the same model, padded differently: a drafter that is often right.
    generator = torch.Generator().manual_seed(3)
    for ours, theirs in zip(draft.parameters(), target.parameters(), strict=True):
        ours.data[: min(len(theirs), num_tokens)] = theirs.data[:num_tokens]
        ours.data[:num_tokens] *= 1 + 0.05 * torch.randn(
            ours.data[:num_tokens].shape, generator=generator
        )
    save("qwen2_draft", draft)

    qwen3 = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **shape,
            vocab_size=320,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=False,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    )
    randomize(qwen3, num_tokens, seed=4)
    save("qwen3", qwen3.to(torch.bfloat16))

    gemma = {
        **shape,
        "vocab_size": 288,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 24,
        "max_position_embeddings": 512,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,  # a quarter of the text whose logits are kept
        "attn_implementation": "eager",
    }
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    }
    gemma3 = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**gemma, rope_parameters=rope)
    )
    randomize(gemma3, num_tokens, seed=5)
    save("gemma3", gemma3.to(torch.bfloat16))
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    gemma2 = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**gemma, **caps))
    randomize(gemma2, num_tokens, seed=6)
    save("gemma2", gemma2.to(torch.bfloat16))


if __name__ == "__main__":
    main()
