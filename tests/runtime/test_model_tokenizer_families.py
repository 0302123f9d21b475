"""The families' tokenizers, token for token: GGUF vocabularies against SentencePiece and `transformers`, folders against
`transformers`, on texts of many scripts and on random ones.
"""

import io
import json

import gguf
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GemmaTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from paceline_runtime import tokenizer_gguf
from paceline_runtime.model_errors import ModelFormatError, ModelNotFound, UnsupportedModel
from paceline_runtime.tokenizer import load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it? They've paid $1,234.56!",
    "def f(x):\n    if x > 10:\n\t\treturn x ** 2\n\n\n# done\r\nprint('🎉')",
    "日本語のテキストと、中文文本，以及한국어 텍스트가 있습니다。",
    "Привет, мир! Καλημέρα κόσμε. שלום עולם مرحبا بالعالم ภาษาไทย",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 👍🏽 and combining e\u0301 n\u0303 ZWJ\u200d end",
    "   leading, trailing   and    many     spaces      \t\t\n\n\n  \n ",
    "", " ", "  ", "\n", "\u00a0non\u00a0breaking\u3000wide",
    "CamelCaseWords ALLCAPS mixedUP iPhone McDonald's O'Neil DON'T don't",
    "1 12 123 1234 12345 ½ ² Ⅷ ٣٤٥",
    "https://example.com/a?b=c&d=%20#e user@host.org /usr/lib/x86_64-linux-gnu",
    "\ufeffBOM \u0000null \ud7ff edge \U0010ffff last",
]  # fmt: skip
TRAINING = [line for text in CORPUS for line in text.split("\n")] * 20
TEXTS = st.one_of(st.text(max_size=60), st.text("ab <s>/\n\t▁é😀日", max_size=30))
many = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


# -- SentencePiece vocabularies in GGUF -----------------------------------------------------------------------------


def train_sentencepiece(*, prefix: bool, **options) -> sentencepiece.SentencePieceProcessor:
    """Train as Llama's and Gemma's were: BPE, bytes to fall back on, no normalisation."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in TRAINING if line.strip() and "\0" not in line]),
        model_writer=model,
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def piece_type(model, index) -> int:
    checks = [(model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6)]
    return next((kind for check, kind in checks if check(index)), 1)


def sentencepiece_gguf(path, model, *, prefix, user_defined=(), **values) -> str:
    """Write a vocabulary as llama.cpp's converter does."""
    ids = range(model.get_piece_size())
    pieces = [model.id_to_piece(i) for i in ids]
    writer = gguf.GGUFWriter(path / "tokenizer.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores(values.pop("scores", [model.get_score(i) for i in ids]))
    writer.add_token_types(
        values.pop("types", [4 if piece in user_defined else piece_type(model, i) for i, piece in enumerate(pieces)])
    )
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())
    writer.add_add_space_prefix(prefix)
    for key, value in values.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path / "tokenizer.gguf")


@pytest.fixture(scope="module", params=[True, False], ids=["llama", "gemma"])
def spm(request, tmp_path_factory):
    """A trained SentencePiece model and our tokenizer out of its GGUF."""
    symbols = () if request.param else ("<tag>", "▁▁", "▁▁▁", "▁▁▁▁")
    model = train_sentencepiece(prefix=request.param, user_defined_symbols=list(symbols))
    path = tmp_path_factory.mktemp("spm")
    return model, load_tokenizer(sentencepiece_gguf(path, model, prefix=request.param, user_defined=symbols)), request.param


@pytest.mark.parametrize("text", CORPUS)
def test_sentencepiece_corpus(spm, text):
    model, tokenizer, _ = spm
    expected = model.encode(text.replace("\0", ""))
    assert tokenizer.encode(text.replace("\0", ""), add_special_tokens=False) == expected
    assert tokenizer.encode(text.replace("\0", "")) == [model.bos_id(), *expected]
    assert tokenizer.decode(expected) == text.replace("\0", "")


@many
@given(text=TEXTS.filter(lambda text: "\0" not in text and "▁" not in text and "<s>" not in text and "</s>" not in text))
def test_sentencepiece_any_text(spm, text):
    model, tokenizer, _ = spm
    assert tokenizer.encode(text, add_special_tokens=False) == model.encode(text)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push([token]) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(pieces) + detokenizer.flush() == text


def test_special_and_user_defined_pieces(spm):
    model, tokenizer, prefix = spm
    assert tokenizer.encode("<s>a</s>", add_special_tokens=False)[0] == model.bos_id()
    assert tokenizer.encode("<s>a</s>", add_special_tokens=False)[-1] == model.eos_id()
    if not prefix:
        assert tokenizer.encode("a<tag>", add_special_tokens=False)[-1] == model.piece_to_id("<tag>")


def test_begin_and_end_as_the_file_wants_them(tmp_path):
    model = train_sentencepiece(prefix=True)
    uri = sentencepiece_gguf(tmp_path, model, prefix=True, add_bos_token=False, add_eos_token=True)
    assert load_tokenizer(uri).encode("a") == [*model.encode("a"), model.eos_id()]


def test_broken_sentencepiece_vocabularies(tmp_path):
    model = train_sentencepiece(prefix=True)
    with pytest.raises(ModelFormatError, match="2 scores for"):
        load_tokenizer(sentencepiece_gguf(tmp_path, model, prefix=True, scores=[0.0, 0.0]))
    with pytest.raises(ModelFormatError, match="2 token types for"):
        load_tokenizer(sentencepiece_gguf(tmp_path, model, prefix=True, types=[1, 1]))


# -- byte-level vocabularies in GGUF --------------------------------------------------------------------------------


def train_bytes(pattern: pre_tokenizers.PreTokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pattern
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    document = json.loads(tokenizer.to_str())["model"]
    return document["vocab"], [tuple(merge) for merge in document["merges"]]


def bytes_gguf(path, vocab, merges, pre) -> str:
    writer = gguf.GGUFWriter(path / "tokenizer.gguf", "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = sorted(vocab, key=vocab.get)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|endoftext|>" else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(vocab["<|endoftext|>"])
    writer.add_bos_token_id(vocab["<|endoftext|>"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path / "tokenizer.gguf")


FAMILIES = {"qwen2": Qwen2Tokenizer, "gpt-2": GPT2Tokenizer}


@pytest.fixture(scope="module", params=FAMILIES)
def byte_level(request, tmp_path_factory):
    """transformers' tokenizer of a family over a trained vocabulary, and ours out of its GGUF."""
    vocab, merges = train_bytes(tokenizer_gguf._PRE_TOKENIZERS[request.param].make())
    theirs = FAMILIES[request.param](vocab=vocab, merges=merges)
    return theirs, load_tokenizer(bytes_gguf(tmp_path_factory.mktemp("bytes"), vocab, merges, request.param))


@pytest.mark.parametrize("text", CORPUS)
def test_byte_level_corpus(byte_level, text):
    theirs, ours = byte_level
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids)


@many
@given(text=TEXTS)
def test_byte_level_any_text(byte_level, text):
    theirs, ours = byte_level
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_llama3_splits_as_its_own_tokenizer_does():
    theirs = TikTokenConverter(vocab_file="unused").pattern
    assert theirs == tokenizer_gguf._LLAMA3_PATTERN


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-4o", "CamelCase's 12345", ["Camel", "Case's", "Ġ", "123", "45"]),
        ("gpt-4o", "a/b\n/c", ["a", "/b", "Ċ", "/c"]),
        ("tekken", "CamelCase's 12", ["Camel", "Case", "'s", "Ġ", "1", "2"]),
        ("dbrx", "CamelCase's 12345", ["CamelCase", "'s", "Ġ", "123", "45"]),
    ],
)
def test_pieces_of_other_patterns(pre, text, pieces):
    assert [piece for piece, _ in tokenizer_gguf._PRE_TOKENIZERS[pre].make().pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_begin_token_where_the_file_says_nothing(pre, begins, tmp_path):
    vocab, merges = train_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False))
    ids = load_tokenizer(bytes_gguf(tmp_path, vocab, merges, pre)).encode("a")
    assert (ids[0] == vocab["<|endoftext|>"]) == begins


# -- Hugging Face folders -------------------------------------------------------------------------------------------

TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


def sentencepiece_parts(prefix):
    """Return a trained vocabulary and merges as transformers wants them."""
    model = train_sentencepiece(prefix=prefix, pad_id=3, pad_piece="<pad>")
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    scores = {piece: model.get_score(i) for piece, i in vocab.items() if piece_type(model, i) == 1}
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return vocab, [(left, right) for _, left, right in merges]


def make_family(name):
    if name == "qwen2":
        vocab, merges = train_bytes(tokenizer_gguf._PRE_TOKENIZERS["qwen2"].make())
        return Qwen2Tokenizer(vocab=vocab, merges=merges)
    vocab, merges = sentencepiece_parts(prefix=name == "llama")
    if name == "llama":
        return LlamaTokenizer(vocab=vocab, merges=merges, pad_token="<pad>")
    return GemmaTokenizer(vocab=vocab, merges=merges, bos_token="<s>", eos_token="</s>", mask_token="<unk>")


@pytest.fixture(scope="module", params=["qwen2", "llama", "gemma"])
def folder(request, tmp_path_factory):
    """A saved tokenizer: transformers' and ours."""
    theirs = make_family(request.param)
    theirs.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(path)
    ours = load_tokenizer(str(_with_config(path)))
    yield theirs, ours
    ours.close()


def _with_config(path):
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return path


@pytest.mark.parametrize("text", CORPUS)
def test_folder_corpus(folder, text):
    theirs, ours = folder
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@many
@given(text=TEXTS)
def test_folder_any_text(folder, text):
    theirs, ours = folder
    assert ours.encode(text) == theirs.encode(text)


def test_folder_chats(folder):
    theirs, ours = folder
    messages = [{"role": "user", "content": "Hi 👋"}, {"role": "assistant", "content": "Hello"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False)


@pytest.fixture
def small_folder(tmp_path):
    backend = Tokenizer(models.BPE({"a": 0, "<s>": 1}, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    return _with_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template must be a text or a list"),
        ("tokenizer_config.json", {"bos_token": ["<s>"]}, "bos_token must be a text or an object"),
        ("tokenizer_config.json", {"bos_token": {"text": "<s>"}}, "bos_token must be a text or an object"),
        ("generation_config.json", {"eos_token_id": "two"}, r"generation_config.json: eos_token_id must be a token id"),
    ],
)
def test_broken_settings(small_folder, name, content, message):
    (small_folder / name).write_text(json.dumps(content))
    with pytest.raises(ModelFormatError, match=message):
        load_tokenizer(str(small_folder))


def test_named_templates_and_older_places(small_folder):
    def text(template=None):
        if template is not None:
            (small_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        tokenizer = load_tokenizer(str(small_folder))
        tokenizer.close()
        return tokenizer.chat_template

    assert text() == ""
    (small_folder / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    assert text() == "older"
    assert text([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]) == "plain"
    assert text([{"name": "rag", "template": "only"}]) == "only"
    (small_folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFormatError, match="isn't UTF-8"):
        text()


def test_what_cannot_be_run_is_said_before_what_is_missing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_in_another_format_is_named(small_folder):
    (small_folder / "tokenizer.json").unlink()
    (small_folder / "tokenizer.model").touch()
    (small_folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 9,
                    "intermediate_size": 8, "num_hidden_layers": 1})
    )  # fmt: skip
    with pytest.raises(ModelNotFound, match=r"holds no tokenizer.json \(only tokenizer.model, which isn't read\)"):
        load_tokenizer(str(small_folder))
