"""Tokenizer directories and templates of which transformers' own results are stored.

Needs the package tokenizers alone, so that the reference can make the same directories.
"""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

# ------------------------------------------------------------------ vocabularies

MERGES = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("Ġ", "w"),
    ("1", "2"),
    ("Ã", "©"),
    ("Ġ", "Ġ"),
    ("hell", "o"),
    ("Ċ", "Ċ"),
]
PIECES = ["▁", "h", "i", "▁h", "▁hi", "▁▁", "▁▁▁", "h▁", "▁<PRE>", "é"]


def alphabet():
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_vocabulary():
    words = [*alphabet(), *(a + b for a, b in MERGES), "</s>", "<|end|>"]
    return {word: i for i, word in enumerate(words)}


def bytes_tokenizer(decoder=True):
    made = Tokenizer(models.BPE(byte_vocabulary(), MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if decoder:
        made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    made.add_tokens([AddedToken("é!", normalized=False), AddedToken("Ġx", normalized=False)])
    return made


def piece_tokenizer(decoder, scheme):
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    made = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(vocabulary)},
            [("▁", "h"), ("▁h", "i")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if scheme == "prepend":
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoder
    special = ["<unk>", "<s>", "</s>", "▁<PRE>"]
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    made.add_tokens([AddedToken("▁▁▁▁", normalized=False), AddedToken(" x", normalized=False)])
    return made


def llama2_tokenizer():
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return piece_tokenizer(decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]), "prepend")


def gemma_tokenizer():
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return piece_tokenizer(decoders.Sequence(steps), "never")


def metaspace_tokenizer(scheme):
    return piece_tokenizer(decoders.Metaspace(prepend_scheme=scheme), scheme)


def limited(truncation=None, padding=None):
    made = bytes_tokenizer()
    if truncation:
        made.enable_truncation(truncation)
    if padding:
        made.enable_padding(length=padding, pad_id=0, pad_token="!")
    return made


# ------------------------------------------------------------------ directories


def token(content, **flags):
    base = dict(lstrip=False, rstrip=False, normalized=False, single_word=False, special=True)
    return {"content": content, **base, **flags}


def plain(content):
    """As special_tokens_map.json has it."""
    return {k: v for k, v in token(content).items() if k != "special"}


CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NEXT = len(byte_vocabulary()) + 2
VOCAB = {"vocab.json": byte_vocabulary, "merges.txt": lambda: ["#version: 0.2", *MERGES]}
END = "<|endoftext|>"
LISTED = {
    str(NEXT): token("<|tool|>"),
    str(NEXT + 1): token("<think>", special=False),
    str(NEXT + 2): token("<mask>", lstrip=True, rstrip=True),
}


def saved(role_token):
    return {"__type": "AddedToken", **token(role_token)}


# name -> files by name, of which a callable makes the content.
DIRECTORIES = {
    "bytes": {"tokenizer.json": bytes_tokenizer},
    "truncation": {"tokenizer.json": lambda: limited(truncation=8)},
    "padding": {"tokenizer.json": lambda: limited(padding=60)},
    "both": {"tokenizer.json": lambda: limited(truncation=4, padding=6)},
    "no decoder": {"tokenizer.json": lambda: bytes_tokenizer(decoder=False)},
    "llama 2": {"tokenizer.json": llama2_tokenizer},
    "gemma": {"tokenizer.json": gemma_tokenizer},
    "metaspace always": {"tokenizer.json": lambda: metaspace_tokenizer("always")},
    "metaspace first": {"tokenizer.json": lambda: metaspace_tokenizer("first")},
    "metaspace never": {"tokenizer.json": lambda: metaspace_tokenizer("never")},
    "listed": {"tokenizer.json": bytes_tokenizer, CONFIG: {"added_tokens_decoder": LISTED}},
    "listed before map and added": {
        "tokenizer.json": bytes_tokenizer,
        CONFIG: {"added_tokens_decoder": LISTED, "eos_token": "<|end|>"},
        MAP: {"eos_token": "</s>", "bos_token": "</s>"},
        ADDED: {"<other>": NEXT},
    },
    "listed again": {
        "tokenizer.json": bytes_tokenizer,
        CONFIG: {"added_tokens_decoder": {str(NEXT - 3): token("<|end|>", special=True)}},
    },
    "added": {
        "tokenizer.json": bytes_tokenizer,
        CONFIG: {},
        ADDED: {"<think>": NEXT + 1, "<|tool|>": NEXT},
        MAP: {"extra_special_tokens": ["<|tool|>"]},
    },
    "map of strings": {
        "tokenizer.json": bytes_tokenizer,
        CONFIG: {"bos_token": "<|end|>"},
        MAP: {"bos_token": "</s>", "eos_token": "<|end|>"},
    },
    "map of objects": {
        "tokenizer.json": bytes_tokenizer,
        MAP: {"bos_token": plain("</s>"), "eos_token": plain("<|end|>"), "sep_token": "<sep>"},
    },
    "all roles": {
        "tokenizer.json": bytes_tokenizer,
        CONFIG: {
            "bos_token": saved("<s>"),
            "eos_token": "</s>",
            "unk_token": None,
            "sep_token": "<sep>",
            "pad_token": "<pad>",
            "cls_token": saved("<cls>"),
            "mask_token": saved("<mask>"),
            "image_token": "<image>",
            "additional_special_tokens": ["<a>", saved("<b>")],
            "add_bos_token": True,
        },
    },
    "split special tokens": {
        "tokenizer.json": bytes_tokenizer,
        CONFIG: {"split_special_tokens": True, "eos_token": "</s>"},
    },
    "gpt2": {**VOCAB, CONFIG: {"tokenizer_class": "GPT2Tokenizer"}},
    "gpt2 fast": {
        **VOCAB,
        CONFIG: {
            "tokenizer_class": "GPT2TokenizerFast",
            "bos_token": "</s>",
            "eos_token": "<|end|>",
            "unk_token": None,
            "add_prefix_space": True,
            "add_bos_token": True,
            "add_eos_token": True,
        },
    },
    "gpt2 with added tokens": {
        **VOCAB,
        CONFIG: {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True},
        MAP: {"bos_token": plain("</s>")},
        ADDED: {"<think>": NEXT - 1, "<tool>": NEXT - 2},
    },
    "qwen2": {**VOCAB, CONFIG: {"tokenizer_class": "Qwen2Tokenizer"}},
    "qwen2 listed": {
        **VOCAB,
        CONFIG: {
            "tokenizer_class": "Qwen2TokenizerFast",
            "added_tokens_decoder": {
                str(NEXT - 2): token(END),
                str(NEXT - 1): token("<|im_start|>"),
                str(NEXT): token("<think>", special=False),
            },
            "additional_special_tokens": ["<|im_start|>"],
            "eos_token": "<|im_start|>",
            "pad_token": END,
            "bos_token": None,
            "add_bos_token": False,
        },
    },
}
TEXTS = [
    "hello world",
    "  hello   w 12 123\n\n é é I'll",
    "hello <|end|> hi</s>hi </s> x",
    "a <think> b <|tool|><mask> c<mask>d <sep><cls> <pad>",
    "<s>hi<|im_start|>user\n<|endoftext|><tool> <a><b><image>",
    " hi ▁<PRE> ▁▁▁▁hi   日本 😊",
]


def id_lists(vocab_size):
    """Lists of ids of the vocabulary's end, where the added tokens are, with others between."""
    last = [vocab_size - 1 - i for i in range(min(16, vocab_size))]
    pairs = [[a, b] for a in last[:12] for b in (last[3], 66, 40)]
    return [*([i] for i in last), *pairs, [66, *last[:6], 67], [67, 66, last[0], 68, last[1]], last]


def write_directory(name, directory):
    """Write the files of a case."""
    for file, content in DIRECTORIES[name].items():
        made = content() if callable(content) else content
        if isinstance(made, Tokenizer):
            made.save(str(directory / file))
        elif file == "merges.txt":
            lines = (line if isinstance(line, str) else " ".join(line) for line in made)
            (directory / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
        else:
            (directory / file).write_text(json.dumps(made), encoding="utf-8")


# ------------------------------------------------------------------ templates

CHAT = [
    {"role": "system", "content": "be <b>brief</b> & 'kind'"},
    {"role": "user", "content": "é\n"},
    {
        "role": "assistant",
        "content": "a",
        "tool_calls": [{"name": "f", "arguments": {"z": 1, "a": "<"}}],
    },
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
TEMPLATES = {
    "generation": "{% for m in messages %}{% generation %}\n  {{ m.content }}\n{% endgeneration %}|"
    "{% endfor %}",
    "generation trims": "{%- for m in messages -%} {%- generation -%} {{ m.role }} "
    "{%- endgeneration -%} {{ loop.index }}\n{%- endfor %}",
    "generation scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}"
    "{{ x }}",
    "generation in a macro": "{% macro f(m) %}{% generation %}{{ m.role }}{% endgeneration %}"
    "{% endmacro %}{{ f(messages[0]) }}{{ f(messages[1]) }}",
    "json": "{{ messages[2] | tojson }}",
    "json ascii": "{{ messages[1] | tojson(ensure_ascii=True) }}",
    "json indent": "{{ messages[2].tool_calls | tojson(indent=4) }}",
    "json sorted": "{{ messages[2].tool_calls | tojson(sort_keys=true, separators=(',', ':')) }}",
    "json positional": "{{ messages[1] | tojson(true, 2) }}",
    "json list separators": "{{ messages[1] | tojson(separators=[', ', '=']) }}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.role }}{% if m.role == 'user' %}{% break %}{% endif %}{% endfor %}",
    "blocks": "  {% if true %}\n    a\n  {% endif %}\n b {# no #}\n{{ bos_token }}\n",
    "namespace": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}"
    "{% endfor %}{{ n.i }}",
    "filters": "{{ messages | map(attribute='role') | join(', ') | upper }}{{ ' a ' | trim }}",
    "undefined": "{{ nothing }}{{ tools is none }}{{ documents is none }}{{ x is defined }}",
    "prompt": "{% if add_generation_prompt %}{{ bos_token }}go{{ eos_token }}{% endif %}",
    "methods": "{{ messages[0].content.split(' ')[0].strip() }}"
    "{{ messages[2].items() | list | length }}",
    "dict": "{{ dict(a=1) | tojson }}{{ messages[2].get('absent', 7) }}",
}
BROKEN = {
    "refused": "{{ raise_exception('roles must alternate') }}",
    "no syntax": "{% if %}",
    "no end": "{% generation %}a",
    "a type": "{{ 1 + 'a' }}",
    "nothing's attribute": "{{ x.y.z }}",
    "a division": "{{ 1 // 0 }}",
    "endless": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "no filter": "{{ '' | absent }}",
    "no function": "{{ absent() }}",
    "unsafe": "{{ ''.__class__.__mro__ }}",
    "a change": "{{ messages.append(1) }}",
    "a long range": "{% for i in range(10**9) %}{% endfor %}",
    "no pattern": "{{ strftime_now(5) }}",
    "no json": "{{ raise_exception | tojson }}",
    "a key": "{{ {'a': 1} | items | map(attribute='x.y') | list | first | int + none }}",
}
