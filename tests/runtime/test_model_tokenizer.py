"""Tokens and text: SmolLM2's tokenizer out of GGUF metadata, pre-tokenizers by name, streams of whole characters."""

import json
import subprocess
import sys
import threading
import time

import gguf
import model_harness as harness
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from paceline_runtime.gguf_file import read_gguf
from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel
from paceline_runtime.tokenizer import load_tokenizer
from paceline_runtime.tokenizer_gguf import build_tokenizer
from paceline_runtime.uri import resolve_model


@pytest.fixture(scope="module")
def smollm2():
    tokenizer = load_tokenizer(harness.SMOLLM2)
    yield tokenizer
    tokenizer.close()


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", " world"]),
        ("in 1984, 42nd", ["in", " ", "1", "9", "8", "4", ",", " ", "4", "2", "nd"]),  # every digit is a token
        ("a  b\n\n 7", ["a", " ", " b", "\n\n ", "7"]),  # the split at digits comes first
        ("it's", ["it", "'s"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_smollm2_pieces(smollm2, text, pieces):
    assert [smollm2.decode([i], skip_special_tokens=False) for i in smollm2.encode(text)] == pieces


@pytest.mark.model
def test_smollm2_is_the_tokenizer_it_was_trained_with():
    """Hugging Face's tokenizer.json for SmolLM2 splits single digits, then bytes by GPT-2's pattern, and adds nothing."""
    file = read_gguf(resolve_model(harness.SMOLLM2))
    ours = build_tokenizer(file)
    vocabulary = {token: i for i, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    theirs = Tokenizer(models.BPE(vocabulary, merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in ("The 3 quick brown foxes of 2024 can't jump.\n\tdef f(x): return x**2", "日本語 мир 😀é", "   "):
        assert ours.encode(text).ids == theirs.encode(text).ids


@pytest.mark.model
def test_smollm2_facts(smollm2):
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.vocab_size == 49_152
    assert smollm2.encode("") == []
    assert smollm2.decode([1, 2]) == ""
    assert smollm2.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


@pytest.mark.model
def test_smollm2_chat(smollm2):
    prompt = smollm2.apply_chat_template([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert prompt == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    closed = smollm2.apply_chat_template([{"role": "user", "content": "U"}], add_generation_prompt=False)
    assert closed.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert closed.endswith("U<|im_end|>\n")


@pytest.mark.model
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_survives(smollm2, text):
    ids = smollm2.encode(text)
    stream = smollm2.detokenizer()
    pieces = [stream.push([i]) for i in ids]
    assume(smollm2.decode(ids) == text)  # a few bytes were too rare in training to become tokens
    assert "".join(pieces) + stream.flush() == text


@pytest.mark.model
def test_a_long_text_stops_nobody_while_it_becomes_tokens(smollm2):
    """The library's call for one text keeps the interpreter to itself; then this thread would get no turn at all."""
    text = "A long text, of which a client sends a whole one at once. " * 20_000
    work = threading.Thread(target=smollm2.encode, args=(text,))
    work.start()
    turns = 0
    while work.is_alive():
        time.sleep(0.0001)  # hands the interpreter over, and gets it back at once or when the work is done
        turns += 1
    assert turns > 30


@pytest.mark.model
def test_no_token_stands_for_more_characters_than_is_said(smollm2):
    assert smollm2.max_token_chars == max(len(smollm2.decode([i])) for i in range(smollm2.vocab_size)) > 1


@pytest.mark.model
def test_a_stream_never_shows_half_a_character(smollm2):
    text = "naïve 😀 日本語 👩‍👩‍👧 end"
    stream = smollm2.detokenizer()
    pieces = [stream.push([i]) for i in smollm2.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.flush() == ""


@pytest.mark.model
def test_a_stream_of_broken_bytes_goes_on(smollm2):
    half = smollm2.encode("😀")[0]
    stream = smollm2.detokenizer()
    assert stream.push([half]) == ""
    assert stream.flush() == "\ufffd"
    stream = smollm2.detokenizer()
    text = stream.push([half] * 40)
    assert text.count("\ufffd") >= 32, "what can't become a character is given out"
    assert stream.push(smollm2.encode(" ok")).endswith(" ok")


# -- other files ----------------------------------------------------------------------------------------------------


def tokenizer_gguf(tmp_path, *, pre="gpt-2", model="gpt2", add_bos=None, merges=("a b",), types=None, **ids):
    """Write a GGUF with a byte vocabulary, one merge and a control token."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<s>"]
    path = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(list(merges))
    writer.add_token_types(types or [1] * (len(tokens) - 1) + [3])
    for name, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    if add_bos is not None:
        writer.add_bool("tokenizer.ggml.add_bos_token", add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_merges_and_special_tokens(tmp_path):
    tokenizer = load_tokenizer(tokenizer_gguf(tmp_path, eos=257))
    assert tokenizer.encode("ab<s>") == [256, 257]
    assert tokenizer.decode([256, 257]) == "ab"
    assert tokenizer.eos_token_ids == (257,)


@pytest.mark.parametrize(("add_bos", "ids"), [(True, [257, 256]), (False, [256]), (None, [256])])
def test_begin_of_text(tmp_path, add_bos, ids):
    tokenizer = load_tokenizer(tokenizer_gguf(tmp_path, add_bos=add_bos, bos=257))
    assert tokenizer.encode("ab") == ids
    assert tokenizer.encode("ab", add_special_tokens=False) == [256]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 123456", ["a", "Ġ123456"]),
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "a 123456 I'M", ["a", "Ġ", "123", "456", "ĠI", "'M"]),
        ("qwen2", "a 12", ["a", "Ġ", "1", "2"]),
    ],
)
def test_pre_tokenizers(tmp_path, pre, text, pieces):
    backend = build_tokenizer(read_gguf(resolve_model(tokenizer_gguf(tmp_path, pre=pre))))
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_unsupported_tokenizers(tmp_path):
    with pytest.raises(UnsupportedModel, match="tokenizer model 'bert'"):
        load_tokenizer(tokenizer_gguf(tmp_path, model="bert"))
    with pytest.raises(UnsupportedModel, match="pre-tokenizer 'chameleon'"):
        load_tokenizer(tokenizer_gguf(tmp_path, pre="chameleon"))


def test_inconsistent_tokenizers(tmp_path):
    with pytest.raises(ModelFormatError, match="don't fit together"):
        load_tokenizer(tokenizer_gguf(tmp_path, merges=["a nothing"]))
    with pytest.raises(ModelFormatError, match="2 token types for 258 tokens"):
        load_tokenizer(tokenizer_gguf(tmp_path, types=[1, 1]))
    with pytest.raises(ModelFormatError, match="outside the vocabulary"):
        load_tokenizer(tokenizer_gguf(tmp_path, eos=258))


def test_hugging_face_folder(tmp_path):
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")]))
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    config = {"eos_token": {"content": "</s>"}, "chat_template": [{"name": "default", "template": "{{ eos_token }}!"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("ab") == [2]
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.apply_chat_template([]) == "</s>!"
    tokenizer.close()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    (tmp_path / "chat_template.jinja").write_text("from a file")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.eos_token_ids == (3, 1)
    assert tokenizer.apply_chat_template([]) == "from a file"
    tokenizer.close()


def test_the_api_process_stays_light():
    code = (
        "import sys; from paceline_runtime import memory, model_config, sampling_params, tokenizer, uri;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
