"""What an inference service samples and reports, checked against Hugging Face. Embedded engine and SGLang alike."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

import tiny_lm
from agentrl.errors import EngineError, EngineErrorKind
from agentrl.inference import EngineClient
from agentrl.types import GenerateRequest, SamplingParams, VersionSpan
from engine_targets import EngineTarget

TOLERANCE = 1e-4


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, tiny_lm.VOCAB_SIZE) for _ in range(length)]


def assert_close(actual: list[float], expected: torch.Tensor) -> None:
    assert len(actual) == len(expected)
    assert torch.allclose(torch.tensor(actual), expected, atol=TOLERANCE, rtol=0), (
        (torch.tensor(actual) - expected).abs().max()
    )


async def test_greedy_completions_equal_those_of_hugging_face_generate(target: EngineTarget) -> None:
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (1, 2, 3, 17, 40, 40, 90, 150)]
    replies = await asyncio.gather(*(target.generate(prompt, temperature=0, max_new_tokens=24) for prompt in prompts))
    model = target.reference(0)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.output_ids == tiny_lm.greedy_ids(model, prompt, max_new_tokens=24)
        assert_close(reply.logprobs, tiny_lm.expected_logprobs(model, prompt, reply.output_ids))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_logprobs_are_those_of_the_tempered_model_under_any_batching(
    target: EngineTarget, temperature: float
) -> None:
    rng = random.Random(2)
    prompts = [random_prompt(rng, rng.randrange(1, 120)) for _ in range(40)]
    lengths = [rng.randrange(1, 50) for _ in prompts]
    replies = await asyncio.gather(
        *(
            target.generate(prompt, temperature=temperature, max_new_tokens=length)
            for prompt, length in zip(prompts, lengths, strict=True)
        )
    )
    for prompt, reply in zip(prompts, replies, strict=True):
        expected = tiny_lm.expected_logprobs(target.reference(0), prompt, reply.output_ids, temperature=temperature)
        assert_close(reply.logprobs, expected)


async def test_a_growing_conversation_reuses_its_cache_and_keeps_exact_logprobs(target: EngineTarget) -> None:
    rng = random.Random(3)

    async def converse(prompt: list[int]) -> int:
        num_cached = 0
        for _ in range(4):
            reply = await target.generate(prompt, temperature=1.0, max_new_tokens=12, ignore_eos=True)
            expected = tiny_lm.expected_logprobs(target.reference(0), prompt, reply.output_ids)
            assert_close(reply.logprobs, expected)
            assert reply.body["meta_info"]["prompt_tokens"] == len(prompt)
            num_cached += reply.body["meta_info"]["cached_tokens"]
            prompt = prompt + reply.output_ids + random_prompt(rng, 9)
        return num_cached

    shared = random_prompt(rng, 30)
    cached = await asyncio.gather(*(converse(shared + random_prompt(rng, 10)) for _ in range(12)))
    # Turn k can reuse all of turn k-1 but its last token; at least the last turns must have found most of theirs.
    assert min(cached) > 60


async def test_a_group_with_one_prompt_shares_its_prefill(target: EngineTarget) -> None:
    prompt = random_prompt(random.Random(4), 100)
    replies = await asyncio.gather(*(target.generate(prompt, max_new_tokens=8) for _ in range(8)))
    for reply in replies:
        assert_close(reply.logprobs, tiny_lm.expected_logprobs(target.reference(0), prompt, reply.output_ids))
    if not target.is_sglang:
        assert sorted(reply.body["meta_info"]["cached_tokens"] for reply in replies) == [0] + [99] * 7


async def test_truncation_limits_the_choice_but_not_the_reported_logprob(target: EngineTarget) -> None:
    prompt = random_prompt(random.Random(5), 20)
    replies = await asyncio.gather(
        *(target.generate(prompt, top_k=3, max_new_tokens=20, ignore_eos=True) for _ in range(6)),
        *(target.generate(prompt, top_p=0.3, max_new_tokens=20, ignore_eos=True) for _ in range(6)),
        *(target.generate(prompt, min_p=0.4, max_new_tokens=20, ignore_eos=True) for _ in range(6)),
    )
    for index, reply in enumerate(replies):
        logits = tiny_lm.expected_logits(target.reference(0), prompt, reply.output_ids)
        probs = torch.softmax(logits, dim=-1)
        chosen = probs.gather(1, torch.tensor(reply.output_ids)[:, None])
        if index < 6:
            assert ((probs > chosen + 1e-5).sum(dim=-1) < 3).all()
        elif index < 12:
            likelier = torch.where(probs > chosen + 1e-5, probs, 0.0).sum(dim=-1)
            assert (likelier < 0.3 + 1e-4).all()
        else:
            assert (chosen[:, 0] >= 0.4 * probs.max(dim=-1).values - 1e-5).all()
        assert_close(reply.logprobs, tiny_lm.expected_logprobs(target.reference(0), prompt, reply.output_ids))


@pytest.mark.parametrize("is_seeded", [False, True])
async def test_samples_follow_the_models_distribution(target: EngineTarget, is_seeded: bool) -> None:
    prompt = random_prompt(random.Random(6), 12)
    probs = torch.softmax(tiny_lm.expected_logits(target.reference(0), prompt, [2])[0], dim=-1)
    draws = [
        reply.output_ids[0]
        for reply in await asyncio.gather(
            *(
                target.generate(prompt, max_new_tokens=1, sampling_seed=seed if is_seeded else None)
                for seed in range(600)
            )
        )
    ]
    counts = torch.bincount(torch.tensor(draws), minlength=tiny_lm.VOCAB_SIZE).double()
    common = probs > 0.02
    expected = 600 * probs.double()
    chi_square = ((counts - expected) ** 2 / expected)[common].sum().item()
    assert chi_square < 3 * int(common.sum())


async def test_a_sampling_seed_decides_the_tokens_whatever_else_is_in_the_batch(target: EngineTarget) -> None:
    if target.is_sglang:
        pytest.skip("SGLang takes sampling_seed only with --enable-deterministic-inference, which needs a GPU")
    prompts = [random_prompt(random.Random(8), length) for length in (3, 12, 40)]

    async def seeded(prompt: list[int], *, seed: int) -> list[int]:
        reply = await target.generate(prompt, temperature=1.2, max_new_tokens=30, ignore_eos=True, sampling_seed=seed)
        return reply.output_ids

    alone = [await seeded(prompt, seed=7) for prompt in prompts]
    others = [target.generate(prompts[1], max_new_tokens=5 + count) for count in range(20)]
    together, _ = await asyncio.gather(
        asyncio.gather(*(seeded(prompt, seed=7) for prompt in prompts)), asyncio.gather(*others)
    )
    assert together == alone
    assert await seeded(prompts[0], seed=8) != alone[0]


async def test_penalties_and_biases_change_the_choice_as_defined(target: EngineTarget) -> None:
    prompt = random_prompt(random.Random(7), 10)
    settings = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": {"5": 1.5}, "ignore_eos": True}
    reply = await target.generate(prompt, temperature=0, max_new_tokens=30, **settings)
    outputs: list[int] = []
    for token_id in reply.output_ids:
        logits = tiny_lm.expected_logits(target.reference(0), prompt, [*outputs, 0])[-1]
        counts = torch.bincount(torch.tensor(outputs, dtype=torch.long), minlength=tiny_lm.VOCAB_SIZE)
        logits = logits - 0.7 * counts - 0.4 * (counts > 0)
        logits[5] += 1.5
        best = logits.topk(2)
        assert token_id == int(best.indices[0]) or float(best.values[0] - best.values[1]) < TOLERANCE
        outputs.append(token_id)


async def test_stop_tokens_stay_in_the_ids_and_leave_the_text(target: EngineTarget) -> None:
    prompt = random_prompt(random.Random(8), 10)
    free = (await target.generate(prompt, temperature=0, max_new_tokens=12, ignore_eos=True)).output_ids
    stop_id = free[5]
    first = free.index(stop_id)
    reply = await target.generate(prompt, temperature=0, max_new_tokens=12, stop_token_ids=[stop_id])
    if tiny_lm.EOS_ID not in free[:first]:
        assert reply.output_ids == free[: first + 1]
        assert reply.finish == {"type": "stop", "matched": stop_id}
        assert reply.body["text"].split() == [f"w{token_id}" for token_id in free[:first] if token_id != 1]
    kept = await target.generate(prompt, temperature=0, max_new_tokens=12, stop_token_ids=[stop_id], no_stop_trim=True)
    assert kept.body["text"].split()[-1] == f"w{stop_id}"


async def test_stop_strings_end_the_generation_and_are_cut_from_the_text(target: EngineTarget) -> None:
    prompt = random_prompt(random.Random(9), 10)
    free = (await target.generate(prompt, temperature=0, max_new_tokens=12, ignore_eos=True)).output_ids
    stop = f"w{free[4]} w{free[5]}"
    reply = await target.generate(prompt, temperature=0, max_new_tokens=12, stop=[stop], ignore_eos=True)
    assert reply.finish == {"type": "stop", "matched": stop}
    assert reply.output_ids[-2:] == [free[4], free[5]]
    assert stop not in reply.body["text"]


async def test_end_of_sequence_waits_for_min_new_tokens_and_can_be_ignored(target: EngineTarget) -> None:
    prompt = random_prompt(random.Random(10), 10)
    bias = {str(tiny_lm.EOS_ID): 30.0}
    reply = await target.generate(prompt, max_new_tokens=12, logit_bias=bias)
    assert reply.output_ids == [tiny_lm.EOS_ID]
    assert reply.finish == {"type": "stop", "matched": tiny_lm.EOS_ID}
    delayed = await target.generate(prompt, max_new_tokens=12, min_new_tokens=5, logit_bias=bias)
    assert tiny_lm.EOS_ID not in delayed.output_ids[:5]
    assert len(delayed.output_ids) == 6
    ignored = await target.generate(prompt, max_new_tokens=12, ignore_eos=True, logit_bias=bias)
    assert ignored.output_ids == [tiny_lm.EOS_ID] * 12
    assert ignored.finish == {"type": "length", "length": 12}


async def test_prompt_logprobs_and_top_logprobs_are_exact(target: EngineTarget) -> None:
    prompt = random_prompt(random.Random(11), 20)
    await target.generate(prompt, max_new_tokens=4)  # a cached prefix must not shorten them
    payload = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 4, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
    }
    reply = await target.call("POST", "/generate", payload)
    meta = reply.body["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == prompt
    assert meta["input_token_logprobs"][0][0] is None
    expected = tiny_lm.expected_logprobs(target.reference(0), prompt[:1], prompt[1:])
    assert_close([entry[0] for entry in meta["input_token_logprobs"][1:]], expected)
    logits = tiny_lm.expected_logits(target.reference(0), prompt, reply.output_ids)
    top = torch.log_softmax(logits, dim=-1).topk(3)
    for row, entries in enumerate(meta["output_top_logprobs"]):
        assert_close([entry[0] for entry in entries], top.values[row])


async def test_the_client_returns_checked_replies(target: EngineTarget) -> None:
    prompt = random_prompt(random.Random(12), 30)
    async with EngineClient(target.base_url) as client:
        request = GenerateRequest(
            rid="client-0001", input_ids=prompt, params=SamplingParams(max_new_tokens=9, temperature=0.8), deadline_s=20
        )
        reply = await client.generate(request, service_id="s")
        assert reply.version_spans == (VersionSpan(version=0, start=0, end=len(reply.output_ids)),)
        expected = tiny_lm.expected_logprobs(target.reference(0), prompt, reply.output_ids, temperature=0.8)
        assert_close(list(reply.logprobs), expected)


async def test_the_client_scores_a_prompt_and_times_it_by_the_engines_clock(target: EngineTarget) -> None:
    prompt = random_prompt(random.Random(13), 30)
    async with EngineClient(target.base_url) as client:
        before = await client.score_prompt(prompt, rid="score-0001", timeout_s=20)
        request = GenerateRequest(
            rid="timed-0001", input_ids=prompt, params=SamplingParams(max_new_tokens=9), deadline_s=20
        )
        reply = await client.generate(request)
        after = await client.score_prompt(prompt, rid="score-0002", timeout_s=20)
    assert before.policy_version == 0
    expected = tiny_lm.expected_logprobs(target.reference(0), prompt[:1], prompt[1:])
    assert_close(list(before.logprobs), expected)
    assert_close(list(after.logprobs), expected)  # although the prompt is cached by now
    times = [score.engine_times for score in (before, reply, after)]
    assert all(time is not None for time in times)
    assert [moment for time in times if time for moment in time] == sorted(
        moment for time in times if time for moment in time
    )


@pytest.mark.parametrize("bad_id", [tiny_lm.VOCAB_SIZE, -1, 10**6])
async def test_the_client_never_sends_an_id_outside_the_vocabulary(target: EngineTarget, bad_id: int) -> None:
    async with EngineClient(target.base_url) as client:
        request = GenerateRequest(
            rid="oov-0001", input_ids=[5, bad_id, 6], params=SamplingParams(max_new_tokens=4), deadline_s=20
        )
        with pytest.raises(EngineError, match=rf"input_ids\[1\] = {bad_id}") as caught:
            await client.generate(request)
        assert caught.value.kind is EngineErrorKind.REJECTED
        assert await client.ready()


async def test_an_id_outside_the_vocabulary_is_refused_and_the_server_lives(target: EngineTarget) -> None:
    if target.is_sglang:
        pytest.skip("an id outside the vocabulary ends a real SGLang server; the client never sends one")
    for bad_id in (tiny_lm.VOCAB_SIZE, -1):
        reply = await target.generate([5, bad_id], max_new_tokens=2)
        assert reply.status == 400
        assert str(bad_id) in reply.body["error"]["message"]
    assert (await target.generate([5, 6], max_new_tokens=2)).status == 200
