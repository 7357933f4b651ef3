"""Trees, packed documents and taps give what the model computes on each path or document alone."""

import pytest
import torch
from transformers import AutoConfig

from heads.cache import TreeCache
from heads.target import TargetConfig, attention_windows, load_target
from heads.tiny import FAMILIES

PARENTS = [-1, 0, 0, 1, 1, 2, 3]


def tree_tensors():
    paths = []
    for node in range(len(PARENTS)):
        path = [node]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        paths.append(path)
    ancestors = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for node, path in enumerate(paths):
        ancestors[node, path] = True
    return paths, ancestors, torch.tensor([len(path) - 1 for path in paths])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", [3, 20])
@torch.inference_mode()
def test_each_tree_path_equals_the_sequence_alone(family, prefix, tiny_target):
    target = tiny_target(family)
    paths, ancestors, depths = tree_tensors()
    prompt = torch.randint(0, 256, (prefix,), generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(0, 256, (len(PARENTS),), generator=torch.Generator().manual_seed(1))
    cache = target.new_cache(prefix + len(PARENTS))
    target.prefill(prompt[None], cache)
    logits = target.logits(target.forward(tokens, ancestors, depths, cache)["final_norm"][0])
    for node, path in enumerate(paths):
        alone = target.model(torch.cat([prompt, tokens[path]])[None], use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[node], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_committed_rows_equal_a_fresh_prefill(family, tiny_target):
    target = tiny_target(family)
    paths, ancestors, depths = tree_tensors()
    prompt, tokens = torch.arange(20), torch.arange(100, 107)
    cache = target.new_cache(64)
    target.prefill(prompt[None], cache)
    for path in (paths[6], paths[5]):
        target.forward(tokens, ancestors, depths, cache)
        cache.commit(torch.tensor(path))
    fresh = target.new_cache(64)
    target.prefill(torch.cat([prompt, tokens[paths[6]], tokens[paths[5]]])[None], fresh)
    assert cache.length == fresh.length == 20 + 4 + 3
    for kept, right in zip(cache.tree_layers, fresh.tree_layers, strict=True):
        torch.testing.assert_close(kept.keys[:, :, :27], right.keys[:, :, :27], rtol=0, atol=1e-4)
        torch.testing.assert_close(kept.values[:, :, :27], right.values[:, :, :27], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_packed_documents_do_not_see_each_other(family, tiny_target):
    target = tiny_target(family)
    first, second = torch.randint(0, 256, (1, 15)), torch.randint(0, 256, (1, 18))
    ids = torch.cat([first, second, torch.full((1, 3), 258)], dim=1)
    positions = torch.cat([torch.arange(15), torch.arange(18), torch.zeros(3).long()])[None]
    documents = torch.tensor([[0] * 15 + [1] * 18 + [-1] * 3])
    packed = target.logits(target.features(ids, positions, documents)["final_norm"])
    assert packed.isfinite().all()
    alone = [target.model(document, use_cache=False).logits for document in (first, second)]
    torch.testing.assert_close(packed[:, :33], torch.cat(alone, dim=1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_rows_of_one_document_need_no_mask_of_ours(family, tiny_target):
    target = tiny_target(family)
    ids = torch.randint(0, 256, (2, 18))
    positions = torch.stack([torch.arange(18), torch.cat([torch.arange(15), torch.zeros(3).long()])])
    documents = torch.tensor([[0] * 18, [0] * 15 + [-1] * 3])
    alike = target.features(ids, positions, documents)["final_norm"]
    masked = target.features(ids, positions, documents + (documents >= 0))["final_norm"]  # documents numbered 1
    torch.testing.assert_close(alike[0], masked[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(alike[1, :15], masked[1, :15], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_taps_are_the_outputs_of_the_named_blocks(tiny_target):
    target = tiny_target("qwen3")
    ids = torch.arange(9)[None]
    taps = ["post_block[0]", "post_block[2]", "post_block[3]"]
    features = target.features(ids, ids, torch.zeros_like(ids), taps)
    states = target.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features["post_block[0]"], states[1])
    torch.testing.assert_close(features["post_block[2]"], states[3])
    torch.testing.assert_close(features["final_norm"], states[-1])
    torch.testing.assert_close(target.decoder.norm(features["post_block[3]"]), states[-1])


def test_attention_that_trees_cannot_use_is_refused_with_the_reason():
    config = AutoConfig.for_model("qwen3_next", layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
    with pytest.raises(ValueError, match="qwen3_next have linear_attention layers, which draft trees cannot use"):
        attention_windows(config)


def test_wrong_targets_are_answered_well(tmp_path):
    with pytest.raises(ValueError, match="random:lama is not a known tiny family; use one of llama"):
        load_target(TargetConfig(name="x", path="random:lama"))
    with pytest.raises(ValueError, match="is neither a model directory nor a reachable hub id"):
        load_target(TargetConfig(name="x", path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"model\.dtype=int8 must be one of auto"):
        TargetConfig(name="x", path="y", dtype="int8")


def test_the_cache_refuses_to_overflow():
    cache = TreeCache(1, 4)
    rows = torch.zeros(1, 1, 5, 2)
    with pytest.raises(AssertionError, match="cache of 4 rows cannot hold 5"):
        cache.update(rows, rows, 0)
