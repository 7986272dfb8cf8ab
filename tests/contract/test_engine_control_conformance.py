"""How an inference service is paused, aborted and given new weights in mid-flight. Embedded engine and SGLang alike."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_lm
from agentrl.inference import EngineClient
from engine_targets import EngineTarget, Reply

TOLERANCE = 1e-4
PROMPT = [7, 8, 9, 10, 11, 12]
LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True}


def assert_spans_match(target: EngineTarget, prompt: list[int], body: dict[str, Any], weights: dict[str, int]) -> None:
    """Every output token has the log-prob the weights of its span give it, over the whole context before it."""
    output_ids = body["output_ids"]
    entries = body["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == output_ids
    position = 0
    for span in body["meta_info"]["weight_versions"]:
        assert span["start"] == position
        position = span["end"]
        expected = tiny_lm.expected_logprobs(target.reference(weights[span["version"]]), prompt, output_ids[:position])
        actual = torch.tensor([entry[0] for entry in entries[span["start"] : position]])
        assert torch.allclose(actual, expected[span["start"] :], atol=TOLERANCE, rtol=0)
    assert position == len(output_ids)


async def test_a_retracted_generation_continues_under_new_weights_and_says_which_token_is_whose(
    target: EngineTarget,
) -> None:
    async with target.streaming(PROMPT, rid="retract-1/", **LONG) as stream:
        await stream.read_until(20)
        assert (await target.call("POST", "/pause_generation", {"mode": "retract"})).status == 200
        assert (await target.update(1, "1")).status == 200
        assert (await target.model_info())["weight_version"] == "1"
        assert (await target.call("POST", "/continue_generation", {})).status == 200
        body = await stream.read_all()
    spans = body["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1"]
    assert spans[0]["end"] >= 20
    assert body["meta_info"]["num_retractions"] == 1
    assert body["meta_info"]["weight_version"] == "1"
    assert_spans_match(target, PROMPT, body, {"0": 0, "1": 1})


async def test_cached_prefixes_do_not_survive_new_weights(target: EngineTarget) -> None:
    await target.generate(PROMPT * 8, max_new_tokens=4)
    await target.update(1, "1")
    reply = await target.generate(PROMPT * 8, max_new_tokens=4)
    assert reply.body["meta_info"]["cached_tokens"] == 0
    assert_spans_match(target, PROMPT * 8, reply.body, {"1": 1})


async def test_an_in_place_update_changes_weights_but_reports_failure(target: EngineTarget) -> None:
    async with target.streaming(PROMPT, rid="inplace-1/", **LONG) as stream:
        await stream.read_until(5)
        await target.call("POST", "/pause_generation", {"mode": "in_place"})
        reply = await target.update(1, "1")
        assert reply.status == 400
        assert reply.body["success"] is False
        assert "Weights were updated" in reply.body["message"]
        assert (await target.model_info())["weight_version"] == "0"
        await target.call("POST", "/continue_generation", {})
        body = await stream.read_all()
    assert [span["version"] for span in body["meta_info"]["weight_versions"]] == ["0", "1"]
    assert body["meta_info"]["num_retractions"] == 0


async def test_an_update_without_a_pause_waits_for_running_requests(target: EngineTarget) -> None:
    running = asyncio.create_task(target.generate(PROMPT, rid="runs-1/", **LONG))
    await target.wait_until_running(1)
    update = asyncio.create_task(target.update(1, "1"))
    reply = await running
    assert [span["version"] for span in reply.body["meta_info"]["weight_versions"]] == ["0"]
    assert len(reply.output_ids) == 400
    assert (await update).status == 200
    after = await target.generate(PROMPT, max_new_tokens=3)
    assert after.body["meta_info"]["weight_version"] == "1"


async def test_a_failed_update_leaves_old_weights_and_version(target: EngineTarget, tmp_path: Path) -> None:
    async with EngineClient(target.base_url) as client:
        before = await client.checksum()
        payload = {"model_path": str(tmp_path / "missing"), "weight_version": "5"}
        reply = await target.call("POST", "/update_weights_from_disk", payload)
        assert reply.status == 400
        assert reply.body["success"] is False
        assert await client.checksum() == before
        assert (await client.model_info()).weight_version == "0"


async def test_a_directory_that_does_not_fit_changes_nothing(target: EngineTarget, tmp_path: Path) -> None:
    if target.is_sglang:
        pytest.skip("SGLang does not promise this")
    for change in ("shape", "missing", "unknown", "truncated"):
        directory = shutil.copytree(target.model_dirs[1], tmp_path / change)
        _spoil(directory / "model.safetensors", change)
        async with EngineClient(target.base_url) as client:
            before = await client.checksum()
            payload = {"model_path": str(directory), "weight_version": "5"}
            reply = await target.call("POST", "/update_weights_from_disk", payload)
            assert (reply.status, reply.body["success"]) == (400, False)
            assert await client.checksum() == before
    reply = await target.generate(PROMPT, max_new_tokens=5)
    assert_spans_match(target, PROMPT, reply.body, {"0": 0})


def _spoil(file: Path, change: str) -> None:
    if change == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
        return
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = tensors.pop(name)
    if change == "shape":
        tensors[name] = tensor[:-1].contiguous()
    if change == "unknown":
        tensors[name], tensors["model.layers.7.extra"] = tensor, tensor.clone()
    save_file(tensors, file, metadata={"format": "pt"})


async def test_the_checksum_proves_an_update(target: EngineTarget) -> None:
    async with EngineClient(target.base_url) as client:
        first = await client.checksum()
        await target.update(1, "1")
        second = await client.checksum()
        await target.update(0, "2")
        assert first != second
        assert await client.checksum() == first


async def test_weight_version_must_be_a_string(target: EngineTarget) -> None:
    reply = await target.update(1, 3)  # type: ignore[arg-type]  # what a careless client sends
    assert reply.status == 400
    assert (await target.model_info())["weight_version"] == "0"


async def test_relabelling_changes_only_the_name(target: EngineTarget) -> None:
    async with EngineClient(target.base_url) as client:
        before = await client.checksum()
        await client.update_weight_version("17")
        assert (await client.model_info()).weight_version == "17"
        assert await client.checksum() == before
    assert (await target.generate(PROMPT, max_new_tokens=2)).body["meta_info"]["weight_version"] == "17"


@pytest.mark.parametrize("path", ["/update_weights_from_tensor", "/update_weights_from_distributed"])
async def test_tensor_updates_need_a_session(target: EngineTarget, path: str) -> None:
    fields = {"names": [], "dtypes": [], "shapes": [], "serialized_named_tensors": []}
    reply = await target.call("POST", path, fields)
    assert reply.status == 400
    assert "begin_weight_update" in reply.text
    assert (await target.call("POST", "/end_weight_update", {})).status == 400
    assert (await target.call("POST", "/begin_weight_update", {"selector": "all"})).status == 200
    assert (await target.call("POST", "/begin_weight_update", {"selector": "all"})).status == 400
    assert (await target.call("POST", "/end_weight_update", {})).status == 200


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_new_requests_hang_while_paused_and_finish_afterwards(target: EngineTarget, mode: str) -> None:
    await target.call("POST", "/pause_generation", {"mode": mode})
    waiting = asyncio.create_task(target.generate(PROMPT, rid=f"hang-{mode}/", max_new_tokens=4))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    await target.call("POST", "/continue_generation", {})
    assert len((await waiting).output_ids) > 0


async def test_health_is_503_while_paused(target: EngineTarget) -> None:
    assert (await target.call("GET", "/health")).status == 200
    assert (await target.call("GET", "/health_generate")).status == 200
    await target.call("POST", "/pause_generation", {"mode": "retract"})
    assert (await target.call("GET", "/health")).status == 503
    assert (await target.call("GET", "/ready")).status == 503
    await target.call("POST", "/continue_generation", {})
    assert (await target.call("GET", "/health")).status == 200
    assert (await target.call("GET", "/ready")).status == 200


async def test_an_unknown_pause_mode_is_refused(target: EngineTarget) -> None:
    assert (await target.call("POST", "/pause_generation", {"mode": "sideways"})).status == 400


async def test_pause_abort_returns_what_was_generated(target: EngineTarget) -> None:
    async with target.streaming(PROMPT, rid="pausing-1/", **LONG) as stream:
        await stream.read_until(10)
        await target.call("POST", "/pause_generation", {"mode": "abort"})
        body = await stream.read_all()
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    assert 10 <= len(body["output_ids"]) < 400
    assert_spans_match(target, PROMPT, body, {"0": 0})


async def test_an_aborted_generation_answers_200_with_aligned_partial_output(target: EngineTarget) -> None:
    running = asyncio.create_task(target.generate(PROMPT, rid="victim-1/", **LONG))
    await target.wait_until_running(1)
    assert (await target.call("POST", "/abort_request", {"rid": "victim-1/"})).text == ""
    reply = await running
    assert reply.status == 200
    assert reply.finish["type"] == "abort"
    assert reply.finish["message"] == "Aborted"
    assert len(reply.output_ids) < 400
    assert_spans_match(target, PROMPT, reply.body, {"0": 0})


async def test_abort_matches_prefixes_of_live_ids_only(target: EngineTarget) -> None:
    tasks = {
        rid: asyncio.create_task(target.generate(PROMPT, rid=rid, **LONG)) for rid in ("traj-1", "traj-10", "traj-2")
    }
    await target.wait_until_running(3)
    await target.call("POST", "/abort_request", {"rid": "traj"})
    await target.call("POST", "/abort_request", {"rid": "traj-1"})
    replies = {rid: await task for rid, task in tasks.items()}
    assert [replies[rid].finish["type"] for rid in ("traj-1", "traj-10", "traj-2")] == ["abort", "abort", "length"]


async def test_a_generation_aborted_in_the_queue_lacks_the_keys_of_one_that_ran(target: EngineTarget) -> None:
    await target.call("POST", "/pause_generation", {"mode": "retract"})
    async with target.streaming(PROMPT, rid="unrelated-1/", max_new_tokens=3) as _:
        waiting = asyncio.create_task(_queued_behind_a_full_batch(target))
        await target.call("POST", "/continue_generation", {})
        reply = await waiting
    assert reply.finish == {"type": "abort", "message": "Abort in waiting queue"}
    assert reply.output_ids == []
    assert not {"prompt_tokens", "cached_tokens", "num_retractions", "reasoning_tokens"} & set(reply.body["meta_info"])


async def _queued_behind_a_full_batch(target: EngineTarget) -> Reply:
    await target.call("POST", "/continue_generation", {})
    info = (await target.call("GET", "/server_info")).body
    fillers = [
        asyncio.create_task(target.generate(PROMPT, rid=f"filler-{index:03d}/", **LONG))
        for index in range(int(info["max_running_requests"]))
    ]
    await target.wait_until_running(len(fillers))
    queued = asyncio.create_task(target.generate(PROMPT, rid="queued-001/", **LONG))
    while not queued.done():
        await target.call("POST", "/abort_request", {"rid": "queued-001/"})
    await target.call("POST", "/abort_request", {"abort_all": True})
    await asyncio.gather(*fillers)
    return await queued


async def test_abort_of_unknown_ids_is_harmless(target: EngineTarget) -> None:
    for payload in ({"rid": "nobody"}, {}, {"rid": ""}):
        reply = await target.call("POST", "/abort_request", payload)
        assert (reply.status, reply.text) == (200, "")


async def test_a_client_that_disconnects_frees_its_place(target: EngineTarget) -> None:
    with pytest.raises(TimeoutError):
        await target.generate(PROMPT, rid="leaver-1/", timeout_s=0.05, **LONG)
    await target.wait_until_idle(timeout_s=10.0)
    async with target.streaming(PROMPT, rid="leaver-2/", **LONG) as stream:
        await stream.read_until(3)
    await target.wait_until_idle(timeout_s=10.0)


async def test_clients_that_leave_during_control_calls_do_no_harm(target: EngineTarget) -> None:
    async def leave(path: str, payload: dict[str, Any], after_s: float) -> None:
        try:
            async with asyncio.timeout(after_s):
                await target.call("POST", path, payload)
        except TimeoutError:
            pass

    update = {"model_path": str(target.model_dirs[0]), "weight_version": "0"}
    calls = [("/weights_checker", {"action": "checksum"}), ("/update_weights_from_disk", update), ("/flush_cache", {})]
    running = asyncio.create_task(target.generate(PROMPT, rid="steady-1/", **LONG))
    await target.wait_until_running(1)
    await asyncio.gather(*(leave(path, payload, 0.001 * step) for step in range(12) for path, payload in calls))
    assert len((await running).output_ids) == 400
    assert (await target.generate(PROMPT, max_new_tokens=1)).status == 200


async def test_a_live_id_cannot_be_used_twice_but_can_be_used_again(target: EngineTarget) -> None:
    async with target.streaming(PROMPT, rid="twin-1/", **LONG) as stream:
        await stream.read_until(1)
        reply = await target.generate(PROMPT, rid="twin-1/", max_new_tokens=1)
        assert reply.status == 400
        assert "twin-1/" in reply.body["error"]["message"]
        await target.call("POST", "/abort_request", {"rid": "twin-1/"})
        await stream.read_all()
    assert (await target.generate(PROMPT, rid="twin-1/", max_new_tokens=1)).status == 200


async def test_flush_cache_needs_an_idle_engine(target: EngineTarget) -> None:
    await target.generate(PROMPT * 6, max_new_tokens=2)
    assert (await target.call("POST", "/flush_cache?timeout=20")).status == 200
    reply = await target.generate(PROMPT * 6, max_new_tokens=2)
    assert reply.body["meta_info"]["cached_tokens"] == 0
    async with target.streaming(PROMPT, rid="busy-1/", **LONG) as stream:
        await stream.read_until(1)
        assert (await target.call("POST", "/flush_cache")).status == 400


async def test_the_three_error_shapes(target: EngineTarget) -> None:
    schema = await target.generate(PROMPT, colour="red")
    assert schema.status == 400
    assert "colour" in schema.body["error"]
    engine = await target.generate([], max_new_tokens=2)
    assert engine.status == 400
    assert isinstance(engine.body["error"]["message"], str)
    validation = await target.call("POST", "/update_weights_from_disk", {"weight_version": "1"})
    assert validation.status == 400
    assert validation.body["object"] == "error"
    missing = await target.call("GET", "/get_weight_version")
    assert missing.status == 404
    assert "detail" in missing.body


async def test_impossible_requests_are_refused(target: EngineTarget) -> None:
    too_long = await target.generate([5] * 5000, max_new_tokens=2)
    assert too_long.status == 400
    assert isinstance(too_long.body["error"]["message"], str)
    for sampling in ({"temperature": -1}, {"top_p": 0}, {"top_k": -3}, {"min_p": 2}, {"frequency_penalty": 9}):
        assert (await target.generate(PROMPT, **sampling)).status == 400, sampling
    neither = await target.call("POST", "/generate", {"sampling_params": {"max_new_tokens": 2}})
    assert neither.status == 400


async def test_ids_win_over_text(target: EngineTarget) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 2}
    both = await target.call("POST", "/generate", {"input_ids": PROMPT, "text": "w5", "sampling_params": sampling})
    assert both.body["meta_info"]["prompt_tokens"] == len(PROMPT)


async def test_unknown_top_level_keys_are_ignored(target: EngineTarget) -> None:
    payload = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "colour": "red"}
    assert (await target.call("POST", "/generate", payload)).status == 200


async def test_chunks_of_a_stream_are_cumulative_and_end_with_done(target: EngineTarget) -> None:
    async with target.streaming(PROMPT, rid="stream-1/", temperature=0, max_new_tokens=20, ignore_eos=True) as stream:
        body = await stream.read_all()
    whole = await target.generate(PROMPT, temperature=0, max_new_tokens=20, ignore_eos=True)
    assert stream.is_done
    assert len(stream.chunks) > 1
    for earlier, later in zip(stream.chunks, stream.chunks[1:], strict=False):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
    assert body["output_ids"] == whole.output_ids
    assert body["text"] == whole.body["text"]


async def test_a_refused_stream_carries_its_error_as_an_event(target: EngineTarget) -> None:
    async with target.streaming([], rid="stream-2/", max_new_tokens=2) as stream:
        body = await stream.read_all()
        assert stream.response.status == 200
    assert body["error"]["code"] == 400
    assert stream.is_done


async def test_lists_of_prompts_and_n_answer_with_lists(target: EngineTarget) -> None:
    payload: dict[str, Any] = {
        "input_ids": [PROMPT, PROMPT[:3]],
        "rid": ["list-1/", "list-2/"],
        "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3, "ignore_eos": True}],
        "return_prompt_token_ids": True,
    }
    bodies = (await target.call("POST", "/generate", payload)).body
    assert [body["meta_info"]["id"] for body in bodies] == ["list-1/", "list-2/"]
    assert [body["prompt_token_ids"] for body in bodies] == [PROMPT, PROMPT[:3]]
    assert len(bodies[1]["output_ids"]) == 3
    several = {"input_ids": PROMPT, "rid": "many-1/", "sampling_params": {"max_new_tokens": 2, "n": 3}}
    bodies = (await target.call("POST", "/generate", several)).body
    assert len(bodies) == 3
    assert "many-1/" not in {body["meta_info"]["id"] for body in bodies}


async def test_no_new_tokens_means_an_empty_completion(target: EngineTarget) -> None:
    reply = await target.generate(PROMPT, max_new_tokens=0)
    assert (reply.status, reply.output_ids) == (200, [])
    assert reply.finish["type"] == "length"


async def test_random_traffic_with_aborts_and_updates_stays_exact(target: EngineTarget) -> None:
    rng = random.Random(13)
    num_requests = 40 if target.is_sglang else 200
    weights = {"0": 0}
    prompts: dict[str, list[int]] = {}
    prefix = [rng.randrange(2, tiny_lm.VOCAB_SIZE) for _ in range(40)]

    async def request(index: int) -> tuple[str, Reply]:
        rid = f"storm-{index:04d}/"
        own = [rng.randrange(2, tiny_lm.VOCAB_SIZE) for _ in range(rng.randrange(1, 60))]
        prompts[rid] = prefix[: rng.choice([0, 0, 20, 40])] + own
        length = rng.choice([1, 5, 30, 30, 90])
        await asyncio.sleep(rng.random() * 0.8)
        return rid, await target.generate(prompts[rid], rid=rid, temperature=1.0, max_new_tokens=length)

    async def trouble() -> None:
        for version in range(1, 5):
            await asyncio.sleep(0.1)
            for _ in range(4):
                await target.call("POST", "/abort_request", {"rid": f"storm-{rng.randrange(num_requests):04d}/"})
            weights[str(version)] = version % 2
            await target.call("POST", "/pause_generation", {"mode": "retract"})
            assert (await target.update(version % 2, str(version))).status == 200
            await target.call("POST", "/continue_generation", {})

    trouble_task = asyncio.create_task(trouble())
    replies = await asyncio.gather(*(request(index) for index in range(num_requests)))
    await trouble_task
    spans = 0
    for rid, reply in replies:
        assert reply.status == 200
        spans = max(spans, len(reply.body["meta_info"]["weight_versions"]))
        assert_spans_match(target, prompts[rid], reply.body, weights)
    if not target.is_sglang:
        assert spans > 1, "no generation lived through an update: the test does not test it"


async def test_a_connection_that_sends_nonsense_does_not_disturb_the_server(target: EngineTarget) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.post(target.base_url + "/generate", data=b"{not json") as response:
            assert response.status == 400
        async with session.post(target.base_url + "/generate", json=[1, 2]) as response:
            assert response.status == 400
    assert (await target.generate(PROMPT, max_new_tokens=1)).status == 200
