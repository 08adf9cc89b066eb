"""Host costs come from the real scheduler, pool and engine; the tiny model is what it says."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_cb.bench import host
from mlx_cb.bench.tiny import HIDDEN, LAYERS, tiny_model, write_tiny_model

from .test_prompts import write_tokenizer


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    write_tokenizer(folder)
    vocabulary = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    config = {"vocab_size": vocabulary, "eos_token_id": 0, "bos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"not to be copied")
    return folder


def test_the_tiny_model_has_the_vocabulary_and_two_small_layers(source, tmp_path):
    folder = tmp_path / "tiny"
    write_tiny_model(source, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert config["num_hidden_layers"] == LAYERS == 2
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], HIDDEN)
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (folder / "tokenizer_config.json").is_file()


def test_only_words_can_be_said_greedily(source, tmp_path):
    folder = tmp_path / "tiny"
    write_tiny_model(source, folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert not embedding[0].any()  # end of sequence
    assert (np.abs(embedding).sum(axis=1) > 0).sum() == 676


def test_the_same_seed_writes_the_same_weights(source, tmp_path):
    for name in ("one", "two"):
        write_tiny_model(source, tmp_path / name)
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "two"))
    assert one == two


def test_it_is_made_once(source, tmp_path):
    folder = tiny_model(source, tmp_path / "cache")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_model(source, tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_scheduler_passes_are_timed_at_three_sizes():
    figures = host.scheduler_figures(steps=5)
    assert 0 < figures["schedule_us_8"] < figures["schedule_us_256"] < figures["schedule_us_1024"]
    slope = (figures["schedule_us_1024"] - figures["schedule_us_256"]) / 768
    assert figures["schedule_us_per_request_above_256"] == pytest.approx(slope)


def test_kv_overhead_is_the_unfilled_part_of_last_blocks():
    # The shorter prompt goes first and ends at once; then 33 tokens hold three blocks of 16.
    requests = [host._request(1, 33, 2), host._request(2, 16, 1)]
    assert host._kv_overhead(requests, None, 1) == pytest.approx(48 / 33)


def test_conversations_waste_almost_nothing():
    assert 1.0 < host.kv_overhead_figures()["kv_overhead_chat"] < 1.02


def test_a_scheduler_that_forms_no_step_is_an_error_not_a_loop():
    scheduler = host._scheduler(max_num_seqs=1, capacity=1)
    scheduler.add(host._request(1, 64, 4))
    with pytest.raises(RuntimeError, match="forms no step"):
        host._advance(scheduler)


@pytest.mark.slow
def test_the_engine_is_measured_on_the_tiny_model(tmp_path):
    from mlx_cb.config import ModelConfig
    from mlx_cb.model.resolve import resolve

    folder = tiny_model(resolve(ModelConfig(model="demo")), tmp_path)
    figures = host.engine_figures(folder, steps=4)
    assert 0 < figures["host_step_ms_8"] < figures["host_step_ms_256"]
    assert figures["step_linear_r2"] <= 1.0
    constrained = host.constrained_figures(folder, steps=4)
    ratio = constrained["host_step_ms_16_constrained"] / constrained["host_step_ms_16"]
    assert constrained["constrained_over_plain_16"] == pytest.approx(ratio)
